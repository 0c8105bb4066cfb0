// Copies of a call's keys and values: 16-bit numbers, or e4m3 as the queries, in aligned heads, the
// keys of a sequence in a row. Where many queries see each key, to make them takes less time than
// to convert or gather the keys for each q tile anew.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_KEY_COPIES_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_KEY_COPIES_H_

#include <cuda_runtime.h>

#include "cuda/attention/problem.cuh"

namespace flashxla::attention {

// Whether engines for many queries work on copies. It depends on shapes, strides and dtypes, not on
// addresses.
bool CopiesKeys(const Problem& p);

// Their place in a workspace; 0 if there are none.
int64_t KeyCopiesBytes(const Problem& p);

// The call on its copies, which lie at `memory`; without memory one of the same shape. The call
// itself if it has none. Of a paged call each sequence has a page, which is as large as its row of
// the block table.
Problem OnKeyCopies(const Problem& p, void* memory = nullptr);

// Makes the copies of what sequences of `role` see, and returns the call on them. Other rows that a
// kv tile may have are zeros. The table's entry of a sequence becomes -1 if it sees a page that
// does not exist.
Problem MakeKeyCopies(const Problem& p, Role role, void* memory, cudaStream_t stream);

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_KEY_COPIES_H_
