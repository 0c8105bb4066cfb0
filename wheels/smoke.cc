// A program without Python that loads a CPU library, writes keys into pages, attends to them, and
// holds the result against plain loops: smoke libflashxla_cpu.so. It runs under qemu, too.
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "flashxla/attention.h"
#include "flashxla/kv_cache.h"

namespace {

constexpr int kKeys = 37, kQueries = 5, kHeads = 4, kKvHeads = 2, kSize = 48;
constexpr int kBlocks = 8, kBlockSize = 8, kPages = 5;

template <typename Function>
Function* Find(void* library, const char* name, Function*) {
  auto* function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) std::printf("%s is missing\n", name), std::exit(1);
  return function;
}

template <typename T>
flashxla_tensor Tensor(std::vector<T>& data, flashxla_dtype dtype, std::vector<int64_t> shape) {
  flashxla_tensor t = {data.data(), dtype, static_cast<int64_t>(shape.size()), {}, {}};
  int64_t stride = 1;
  for (int64_t i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i], t.stride[i] = stride;
    stride *= shape[i];
  }
  return t;
}

std::vector<float> Random(int n) {
  static uint32_t state = 1;
  std::vector<float> out(n);
  for (float& x : out) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(state >> 8) / (1 << 23) - 1;
  }
  return out;
}

}  // namespace

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) return std::printf("%s\n", dlerror()), 1;
  auto* last_error = Find(library, "flashxla_last_error", &flashxla_last_error);
  auto* isa = Find(library, "flashxla_cpu_instruction_set", &flashxla_cpu_instruction_set);
  auto* kv_cache = Find(library, "flashxla_cpu_kv_cache", &flashxla_cpu_kv_cache);
  auto* attention = Find(library, "flashxla_cpu_attention", &flashxla_cpu_attention);
  const auto check = [&](flashxla_status status) {
    if (status != FLASHXLA_OK) std::printf("%s\n", last_error()), std::exit(1);
  };

  std::vector<float> k = Random(kKeys * kKvHeads * kSize), v = Random(kKeys * kKvHeads * kSize);
  std::vector<float> q = Random(kQueries * kHeads * kSize), out(q.size());
  std::vector<float> k_cache(kBlocks * kBlockSize * kKvHeads * kSize), v_cache = k_cache;
  std::vector<int32_t> table = {6, 1, 7, 0, 3}, length = {kKeys}, starts = {0, kQueries}, slots;
  for (int j = 0; j < kKeys; ++j) {
    slots.push_back(table[j / kBlockSize] * kBlockSize + j % kBlockSize);
  }
  const std::vector<int64_t> cache_shape = {kBlocks, kBlockSize, kKvHeads, kSize};

  flashxla_context context = {};
  flashxla_kv_cache_args write = {};
  write.key = Tensor(k, FLASHXLA_F32, {kKeys, kKvHeads, kSize});
  write.value = Tensor(v, FLASHXLA_F32, {kKeys, kKvHeads, kSize});
  write.key_cache = Tensor(k_cache, FLASHXLA_F32, cache_shape);
  write.value_cache = Tensor(v_cache, FLASHXLA_F32, cache_shape);
  write.slot_mapping = Tensor(slots, FLASHXLA_I32, {kKeys});
  write.layout = FLASHXLA_NHD;
  write.cache_dtype = FLASHXLA_F32;
  check(kv_cache(&write, &context));

  flashxla_attention_args read = {};
  read.q = Tensor(q, FLASHXLA_F32, {kQueries, kHeads, kSize});
  read.k = write.key_cache;
  read.v = write.value_cache;
  read.cu_seqlens_q = Tensor(starts, FLASHXLA_I32, {2});
  read.seqused_k = Tensor(length, FLASHXLA_I32, {1});
  read.block_table = Tensor(table, FLASHXLA_I32, {1, kPages});
  read.out = Tensor(out, FLASHXLA_F32, {kQueries, kHeads, kSize});
  read.layout = FLASHXLA_NHD;
  read.kv_dtype = FLASHXLA_F32;
  read.causal = 1;
  read.window_left = read.window_right = -1;
  read.max_seqlen_q = kQueries;
  read.max_seqlen_k = kKeys;
  read.softmax_scale = 0.125;
  flashxla_needs needs = {};
  context.needs = &needs;
  check(attention(&read, &context));
  context.needs = nullptr;
  std::vector<char> workspace(needs.workspace_bytes + 64);
  read.workspace = Tensor(workspace, FLASHXLA_U8, {needs.workspace_bytes});
  check(attention(&read, &context));

  double largest = 0;
  for (int i = 0; i < kQueries; ++i) {
    for (int h = 0; h < kHeads; ++h) {
      const int kv_head = h / (kHeads / kKvHeads);
      double sum = 0, expected[kSize] = {};
      for (int j = 0; j <= kKeys - kQueries + i; ++j) {
        double score = 0;
        for (int d = 0; d < kSize; ++d) {
          score +=
              double(q[(i * kHeads + h) * kSize + d]) * k[(j * kKvHeads + kv_head) * kSize + d];
        }
        const double weight = std::exp(score * read.softmax_scale);
        sum += weight;
        for (int d = 0; d < kSize; ++d) {
          expected[d] += weight * v[(j * kKvHeads + kv_head) * kSize + d];
        }
      }
      for (int d = 0; d < kSize; ++d) {
        const double error = std::abs(out[(i * kHeads + h) * kSize + d] - expected[d] / sum);
        if (!(error <= largest)) largest = error;
      }
    }
  }
  std::printf("%s, largest error %.1e: %s\n", isa(), largest, largest < 1e-5 ? "right" : "wrong");
  return largest < 1e-5 ? 0 : 1;
}
