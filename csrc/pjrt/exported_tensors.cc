// DLPack capsules for the memory of Python objects. A consumer may hold such a tensor longer than
// the interpreter lives, so the deleter cannot be Python code.
#include "pjrt/dlpack.h"
#include "pjrt/plugin_adapter.h"

// From the interpreter that loads this library. Weak: a program without one never calls them.
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

// A consumer renames the capsule when it takes the tensor.
constexpr char kNotTaken[] = "dltensor";

void Release(ManagedTensor* tensor) {
  // False once the interpreter begins to shut down; the memory then stays allocated.
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
