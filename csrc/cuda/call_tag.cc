#include "cuda/call_tag.h"

#include <atomic>
#include <random>

namespace flashxla {

uint64_t NewCallTag() {
  static const uint64_t seed = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  static std::atomic<uint64_t> calls{0};
  uint64_t x = seed + (calls.fetch_add(1) + 1) * 0x9e3779b97f4a7c15u;  // splitmix64
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return x != 0 ? x : 1;
}

}  // namespace flashxla
