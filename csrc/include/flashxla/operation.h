// flashxla C ABI: how an operation is declared.
//
// An operation `x` has a list of fields, FLASHXLA_X_FIELDS(F) with F(kind, name, plan), from which
// FLASHXLA_OPERATION(x, FLASHXLA_X_FIELDS) makes its argument struct flashxla_x_args and declares
// the function of each platform, flashxla_cpu_x and flashxla_cuda_x. Listed in operations.h, its
// XLA handler and its description for host programs follow from the same list.
//
// kind: what a field is.
//   INPUT      flashxla_tensor, read; one that the operation updates in place is written, too
//   RESULT     flashxla_tensor, written
//   PLAN       flashxla_tensor, optional: what a call with context->prepare wrote
//   WORKSPACE  flashxla_tensor u8, of flashxla_needs.workspace_bytes
//   INTEGER, LAYOUT (flashxla_layout), DTYPE (flashxla_dtype)   int64_t
//   REAL       double
// plan: what the operation's plan, if it has one, depends on.
//   READ       the data of a tensor
//   STATIC     a tensor's shape, strides, dtype and presence; a scalar
//   NONE       nothing of it
#ifndef FLASHXLA_OPERATION_H_
#define FLASHXLA_OPERATION_H_

#include "flashxla/common.h"

#define FLASHXLA_TYPE_INPUT flashxla_tensor
#define FLASHXLA_TYPE_RESULT flashxla_tensor
#define FLASHXLA_TYPE_PLAN flashxla_tensor
#define FLASHXLA_TYPE_WORKSPACE flashxla_tensor
#define FLASHXLA_TYPE_INTEGER int64_t
#define FLASHXLA_TYPE_LAYOUT int64_t
#define FLASHXLA_TYPE_DTYPE int64_t
#define FLASHXLA_TYPE_REAL double
#define FLASHXLA_MEMBER(kind, name, plan) FLASHXLA_TYPE_##kind name;

#ifdef __cplusplus
#define FLASHXLA_EXTERN_C extern "C"
#else
#define FLASHXLA_EXTERN_C
#endif

#define FLASHXLA_OPERATION(op, fields)                                    \
  typedef struct flashxla_##op##_args {                                   \
    fields(FLASHXLA_MEMBER)                                               \
  } flashxla_##op##_args;                                                 \
  FLASHXLA_EXTERN_C FLASHXLA_EXPORT flashxla_status flashxla_cpu_##op(    \
      const flashxla_##op##_args* args, const flashxla_context* context); \
  FLASHXLA_EXTERN_C FLASHXLA_EXPORT flashxla_status flashxla_cuda_##op(   \
      const flashxla_##op##_args* args, const flashxla_context* context)

#endif  // FLASHXLA_OPERATION_H_
