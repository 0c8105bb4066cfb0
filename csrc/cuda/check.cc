#include "cuda/check.h"

#include <algorithm>
#include <list>
#include <vector>

#include "common/index_checks.h"
#include "common/slot_mapping.h"
#include "common/tensor_view.h"
#include "cuda/launch.h"

namespace flashxla {
namespace {

bool CanCheck(const flashxla_context* context) {
  if (context == nullptr || context->check_indices == 0) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(StreamOf(context), &status) != cudaSuccess) {
    cudaGetLastError();  // the default stream, while another stream is recorded
    return false;
  }
  return status == cudaStreamCaptureStatusNone;
}

// Copies of tensors in host memory.
class HostCopies {
 public:
  explicit HostCopies(cudaStream_t stream) : stream_(stream) {}

  // Starts a copy of the memory from the first to the last element, so that the strides stay valid.
  flashxla_tensor Add(flashxla_tensor t) {
    const int64_t size = ElementSize(t.dtype);
    int64_t first = 0, last = 0;  // element offsets
    for (int64_t i = 0; i < t.rank; ++i) {
      if (t.shape[i] == 0) last = -1;
    }
    for (int64_t i = 0; i < t.rank && last >= 0; ++i) {
      const int64_t step = (t.shape[i] - 1) * t.stride[i];
      (step < 0 ? first : last) += step;
    }
    if (t.data == nullptr) return t;
    // At least one element: an empty tensor is present too, and needs an address.
    std::vector<char>& copy =
        copies_.emplace_back(static_cast<size_t>(std::max<int64_t>(last - first + 1, 1) * size));
    if (last >= first && status_ == cudaSuccess) {
      status_ = cudaMemcpyAsync(copy.data(), static_cast<const char*>(t.data) + first * size,
                                (last - first + 1) * size, cudaMemcpyDeviceToHost, stream_);
    }
    t.data = copy.data() - first * size;
    return t;
  }

  // Waits for the copies.
  flashxla_status Finish(const char* op) {
    if (status_ == cudaSuccess) status_ = cudaStreamSynchronize(stream_);
    if (status_ == cudaSuccess) return FLASHXLA_OK;
    cudaGetLastError();
    return CudaStatus(op, status_);
  }

 private:
  cudaStream_t stream_;
  cudaError_t status_ = cudaSuccess;
  std::list<std::vector<char>> copies_;
};

}  // namespace

flashxla_status CheckAttention(const flashxla_attention_args& args,
                               const flashxla_context* context) {
  if (!CanCheck(context)) return FLASHXLA_OK;
  HostCopies copies(StreamOf(context));
  flashxla_attention_args host = args;
  for (auto field : {&flashxla_attention_args::cu_seqlens_q, &flashxla_attention_args::cu_seqlens_k,
                     &flashxla_attention_args::seqused_k, &flashxla_attention_args::leftpad_k,
                     &flashxla_attention_args::block_table, &flashxla_attention_args::num_seqs}) {
    host.*field = copies.Add(args.*field);
  }
  if (const flashxla_status status = copies.Finish("attention"); status != FLASHXLA_OK) {
    return status;
  }
  std::vector<ListedSequence> sequences;
  return ReadSequences(host, true, &sequences);
}

flashxla_status CheckSlotMapping(const flashxla_tensor& slot_mapping, int64_t num_slots,
                                 const flashxla_context* context) {
  if (!CanCheck(context)) return FLASHXLA_OK;
  HostCopies copies(StreamOf(context));
  const flashxla_tensor host = copies.Add(slot_mapping);
  if (const flashxla_status status = copies.Finish("kv_cache"); status != FLASHXLA_OK) {
    return status;
  }
  return CheckSlots(SlotMapping(host), num_slots);
}

}  // namespace flashxla
