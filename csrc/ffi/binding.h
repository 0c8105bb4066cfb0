// Decodes an XLA FFI call into an operation's C ABI struct, by the operation's table of fields.
//
// All targets have the same calling convention. `flashxla_<op>` runs an operation:
//   operands   the tensors that are present. The attribute `operands` lists their fields in order,
//              separated by commas; `field=name` also gives the caller's name for the field
//   results    likewise, with the attribute `results`. A field that is both an operand and a result
//              is updated in place: the result must alias the operand (output_to_operand_aliasing)
//   attributes the scalars of the struct by name, i64 or f64; `op` is the caller's name for the
//              operation
// `flashxla_<op>_plan` makes the operation's plan, its only result. Its operands are the tensors
// whose data the plan depends on; the attribute `shapes` describes the others, as in
// "q=2[8,32,128],...", where the number before the shape is the dtype.
#ifndef FLASHXLA_CSRC_FFI_BINDING_H_
#define FLASHXLA_CSRC_FFI_BINDING_H_

#include "common/operations.h"
#include "flashxla/common.h"
#include "xla/ffi/api/ffi.h"

namespace flashxla {

namespace ffi = xla::ffi;

// Fills in *args, which must be zeroed, with the arguments of a call or, with `plan`, of a call
// that makes the plan.
ffi::Error Decode(const Operation& operation, bool plan, ffi::RemainingArgs operands,
                  ffi::RemainingRets results, ffi::Dictionary attributes, char* args);

// The error of a failed call in the caller's names: if the caller calls the field `seqused_k`
// `context_lens`, a message that starts with `seqused_k` starts with `context_lens` instead.
ffi::Error ToError(flashxla_status status, ffi::Dictionary attributes);

}  // namespace flashxla

#endif  // FLASHXLA_CSRC_FFI_BINDING_H_
