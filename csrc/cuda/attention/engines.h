// The attention engines for NVIDIA GPUs, and the choice of engines for a call.
#ifndef FLASHXLA_CSRC_CUDA_ATTENTION_ENGINES_H_
#define FLASHXLA_CSRC_CUDA_ATTENTION_ENGINES_H_

#include <cuda_runtime.h>

#include "cuda/attention/problem.cuh"
#include "cuda/launch.h"
#include "flashxla/attention.h"

namespace flashxla::attention {

// What is known about a call without reading its index tensors.
struct Facts {
  Problem problem;  // without a plan
  int64_t num_sequences;
  int64_t capacity;  // the most keys that a sequence can have
};

// The arguments must have passed CheckAttentionArguments. With `aligned`, assumes aligned addresses
// instead of reading them: for a plan, which is made before the addresses are known.
Facts FactsOf(const flashxla_attention_args& args, bool aligned);

struct Engine {
  const char* name;
  const char* description;
  Role role;
  // Why the engine cannot serve a call; "" if it can.
  const char* (*why_not)(const Facts& facts);
  int64_t (*workspace_bytes)(const Problem& problem);  // null: it needs none
  // Computes what the plan lists for the engine's role, which may be nothing.
  flashxla_status (*launch)(const Problem& problem, void* workspace, cudaStream_t stream);
};

extern const Engine kSwapEngine, kSplitEngine, kSimtSplitEngine, kWideEngine, kTileEngine,
    kTile32Engine, kLargeEngine, kLargeSplitEngine, kGeneralEngine;

// Why only the general engine can serve a call's dtypes; "" if others can.
const char* WhyMixedDtypes(const Problem& problem);
// The same of the engines of 16-bit products, whatever the head sizes.
const char* WhyNot16BitDtypes(const Problem& problem);
// Why the engines of heads up to kMaxUsualHeadSize cannot serve a call; "" if they can.
const char* WhyNotUsual(const Problem& problem);
// Why the engines of 16-bit products cannot serve a call; "" if they can. These are exact enough
// for queries of at most 16 bits.
const char* WhyNot16Bit(const Problem& problem);

// The most rows per KV head that a sequence has, if the caller is right.
int64_t MostRows(const Problem& problem);

// Whether the steps of the few-queries role, the kv tiles of all q tiles, can be counted and shared
// out in 32 bits.
// any_length: for sequences of any length too, as cu_seqlens_q may hold them whatever the caller
// promised; otherwise for those of at most MaxFewRows rows.
bool AreFewStepsCountable(const Facts& facts, bool any_length);

// The rows of the q tiles of large and of large_split.
int LargeQTileRows(const Problem& problem);
int LargeSplitQTileRows(const Problem& problem);
// Whether large works on copies of the keys: see key_copies.h.
bool LargeCopiesKeys(const Problem& problem);
// How the engine wide divides its work.
ManyShape WideWork(const Problem& problem);
// Whether wide's thread blocks have room for a plan that they make themselves.
bool FitsOwnPlan(const ManyShape& shape, int64_t num_sequences, int64_t num_tokens);
// Whether swap's threads have to copy the keys: TMA cannot load them, or takes far longer.
bool MustCopyFew(const Problem& problem);
// How swap divides its work if no sequence has more than `most_rows` rows per KV head; -1: any may.
FewShape SwapWork(const Facts& facts, int64_t most_rows);
// The same of the other engines for few queries.
FewShape SplitWork(const Problem& problem, int q_tile_rows);
// Sets what a problem has of the engine for few queries.
void SetFew(const FewShape& few, Problem* problem);
// The workspace of such an engine. Needs SetFew.
int64_t SplitWorkspaceBytes(const Problem& problem);

// The engines that serve a call.
struct Choice {
  const Engine* engines[kNumRoles];  // null: kRest's engine takes this role too
  const char* why_not[kNumRoles];    // why the role's fastest engine does not serve; "" if it does
  bool one_kernel;                   // batch_invariant: no engine for few queries
  bool all_few;                      // every sequence has few queries
  bool make_plan;                    // the engines can make the plan
  bool few_chunks, few_takes_rest;   // as in RoleRules
  FewShape few;
  ManyShape many;
  int rest_q_tile_rows;
  bool rest_copies_keys;

  const Engine& Of(Role role) const {
    if (role == kRest && few_takes_rest) return *engines[kFew];
    return *engines[engines[role] ? role : kRest];
  }
  // Whether there can be work for the role's own engine.
  bool Runs(int role) const {
    if (engines[role] == nullptr) return false;
    return role == kFew || !(all_few || (role == kRest && few_takes_rest));
  }
  // Whether the engine for few queries may start while the one for many still runs.
  bool FewFollows() const { return few.combines && Runs(kMany); }
  RoleRules Roles() const {
    return {engines[kFew] != nullptr,
            all_few,
            few_chunks,
            few_chunks && many.packs_whole(),
            few_takes_rest,
            engines[kMany] != nullptr,
            many.min_queries};
  }
};

Choice ChooseEngines(const Facts& facts);

// Lists the chosen engines as the kernels that serve the call.
void AddKernels(const Choice& choice, flashxla_needs* needs);

// Runs after the engines, if none of them does it: combines the partial results of the engine for
// few queries, and writes the rows that no engine computes.
void LaunchCombine(const Problem& problem, void* workspace, cudaStream_t stream);

}  // namespace flashxla::attention

#endif  // FLASHXLA_CSRC_CUDA_ATTENTION_ENGINES_H_
