// Memory of Python objects in DLPack capsules. Who takes such a tensor may hold it longer than the
// interpreter lives, so its deleter can't be Python code.
#include "pjrt/dlpack.h"
#include "pjrt/plugin_adapter.h"

// Of the interpreter that loads this library. A program without one never gets here.
extern "C" {
__attribute__((weak)) int Py_IsInitialized();
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int state);
__attribute__((weak)) void Py_IncRef(void* object);
__attribute__((weak)) void Py_DecRef(void* object);
__attribute__((weak)) void* PyCapsule_New(void* pointer, const char* name,
                                          void (*destructor)(void* capsule));
__attribute__((weak)) int PyCapsule_IsValid(void* capsule, const char* name);
__attribute__((weak)) void* PyCapsule_GetPointer(void* capsule, const char* name);
}

namespace flashxla::pjrt {
namespace {

// Who takes the tensor gives the capsule another name.
constexpr char kNotTaken[] = "dltensor";

void Release(ManagedTensor* tensor) {
  // False from the moment that the interpreter begins to end; the process then keeps the memory.
  if (!Py_IsInitialized()) return;
  const int state = PyGILState_Ensure();
  Py_DecRef(tensor->manager_ctx);
  PyGILState_Release(state);
}

void ReleaseIfNotTaken(void* capsule) {
  if (!PyCapsule_IsValid(capsule, kNotTaken)) return;
  Release(static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, kNotTaken)));
}

}  // namespace
}  // namespace flashxla::pjrt

using namespace flashxla::pjrt;

void* flashxla_pjrt_new_capsule(void* managed_tensor, void* owner) {
  auto* tensor = static_cast<ManagedTensor*>(managed_tensor);
  tensor->manager_ctx = owner;
  tensor->deleter = Release;
  void* capsule = PyCapsule_New(tensor, kNotTaken, ReleaseIfNotTaken);
  if (capsule != nullptr) Py_IncRef(owner);
  return capsule;
}
