// Chooses the engines of a call. The choice depends on static facts only, so that what a call
// needs, its plan and the call itself agree.
#include <algorithm>
#include <cstdio>

#include "common/needs.h"
#include "common/tensor_view.h"
#include "cuda/attention/dispatch.cuh"
#include "cuda/attention/engines.h"
#include "cuda/attention/tensor_map.h"

namespace flashxla::attention {
namespace {

// For each role the fastest engine comes first.
constexpr const Engine* kEngines[] = {&kSwapEngine,       &kSplitEngine,  &kSimtSplitEngine,
                                      &kLargeSplitEngine, &kWideEngine,   &kLargeEngine,
                                      &kTileEngine,       &kTile32Engine, &kGeneralEngine};

// Why no sequence can have many queries; "" if some can.
const char* WhyNotMany(const Facts& facts, const ManyShape& shape) {
  if (facts.problem.max_queries >= shape.min_queries) return "";
  static thread_local char why[64];  // valid until this thread's next call
  std::snprintf(why, sizeof(why), "no sequence has as many as %d queries", shape.min_queries);
  return why;
}

// The reason of a call with batch_invariant.
const char* WhyOneKernel(const Choice& choice) {
  const char* why_not_many = choice.why_not[kMany];
  if (why_not_many[0] == '\0') return kWhyOneKernel;
  static thread_local char why[256];  // valid until this thread's next call
  std::snprintf(why, sizeof(why), "%s; %s", kWhyOneKernel, why_not_many);
  return why;
}

// What an engine is, and how it works in this call: `more` and `also`, which may be null.
const char* Description(const Engine& engine, const char* more, const char* also = nullptr) {
  if (more == nullptr) more = also, also = nullptr;
  if (more == nullptr) return engine.description;
  // Of each role, valid until this thread's next call.
  static thread_local char all[kNumRoles][192];
  char (&own)[sizeof(all[0])] = all[engine.role];
  std::snprintf(own, sizeof(own), "%s, %s%s%s", engine.description, more,
                also != nullptr ? ", " : "", also != nullptr ? also : "");
  return own;
}

constexpr const char* kInClusters = "TMA, two thread blocks share what they load";
constexpr const char* kOnCopies = "on copies of keys and values";
constexpr const char* kManyParts = "several warps add up a row";

const char* FewDescription(const Choice& choice) {
  const Engine& engine = choice.Of(kFew);
  if (&engine == &kLargeSplitEngine && choice.few.q_tile_rows == kClusterQTileRows) {
    return Description(engine, kInClusters, choice.few.many_parts ? kManyParts : nullptr);
  }
  return Description(engine, choice.few.heads_together > 1 ? "two KV heads in a thread block"
                             : choice.few.copies           ? "threads copy the keys"
                             : choice.few.many_short ? "three thread blocks on a multiprocessor"
                             : choice.few.many_parts ? kManyParts
                                                     : nullptr);
}

const char* ManyDescription(const Choice& choice) {
  const Engine& engine = choice.Of(kMany);
  if (choice.rest_q_tile_rows == kClusterQTileRows) {
    return Description(engine, kInClusters, choice.rest_copies_keys ? kOnCopies : nullptr);
  }
  const ManyShape& many = choice.many;
  return Description(engine,
                     many.fixed_parts > 0 ? "thread blocks may share fixed parts of the keys"
                     : many.odd_heads     ? "heads not of whole 16 bytes"
                     : many.packs_whole() && !choice.one_kernel
                         ? "q tiles of all query heads of a KV head"
                         : nullptr,
                     many.copies_keys ? kOnCopies : nullptr);
}

}  // namespace

const char* WhyMixedDtypes(const Problem& p) {
  if (p.out_dtype != (IsFp8(p.q_dtype) ? int32_t{FLASHXLA_BF16} : p.q_dtype)) {
    return "out and the queries differ in dtype";
  }
  if (p.kv_dtype != p.out_dtype && !IsFp8(p.kv_dtype)) {
    return "keys and queries differ in dtype";
  }
  return "";
}

const char* WhyNotUsual(const Problem& p) {
  if (HasLargeHeads(p)) {
    static thread_local char why[64];  // valid until this thread's next call
    std::snprintf(why, sizeof(why), "a head size, of %d and %d, is above %d", p.k.head_size,
                  p.v.head_size, kMaxUsualHeadSize);
    return why;
  }
  return WhyMixedDtypes(p);
}

const char* WhyNot16BitDtypes(const Problem& p) {
  if (const char* why = WhyMixedDtypes(p); why[0] != '\0') return why;
  return p.q_dtype == FLASHXLA_F32 ? "queries are float32" : "";
}

const char* WhyNot16Bit(const Problem& p) {
  return HasLargeHeads(p) ? WhyNotUsual(p) : WhyNot16BitDtypes(p);
}

int64_t MostRows(const Problem& p) {
  return std::min<int64_t>(p.max_queries, p.num_tokens) * p.group_size;
}

Choice ChooseEngines(const Facts& facts) {
  Choice choice = {};
  const Problem& p = facts.problem;
  choice.one_kernel = p.batch_invariant;
  const int64_t longest = MostRows(p);
  const bool countable = AreFewStepsCountable(facts, true);
  const bool few_rows = longest <= MaxFewRows(p.group_size) && countable;
  for (const Engine* engine : kEngines) {
    const Engine*& chosen = choice.engines[engine->role];
    const char*& why_not = choice.why_not[engine->role];
    if (chosen != nullptr) continue;
    // Nothing would be left for it.
    if (engine->role == kMany && few_rows && choice.engines[kFew] != nullptr) continue;
    // All others take every sequence then, and add up a row in an order that only its own keys'
    // positions decide.
    const bool shares_keys = choice.one_kernel && engine->role == kFew;
    const char* why = shares_keys ? kWhyOneKernel : engine->why_not(facts);
    if (why[0] == '\0' && engine->role == kMany) {
      const ManyShape shape = WideWork(p);
      why = WhyNotMany(facts, shape);
      if (why[0] == '\0') choice.many = shape;
    }
    if (why[0] == '\0') chosen = engine;
    if (why_not == nullptr) why_not = why;
  }
  const bool large = choice.engines[kRest] == &kLargeEngine;
  choice.rest_q_tile_rows = large ? LargeQTileRows(p) : kRestQTileRows;
  choice.rest_copies_keys = large && LargeCopiesKeys(p);
  if (choice.engines[kFew] != nullptr) {
    const bool swap = choice.engines[kFew] == &kSwapEngine;
    choice.all_few = few_rows;
    choice.few_chunks = swap && countable && !choice.all_few;
    const bool large_split = choice.engines[kFew] == &kLargeSplitEngine;
    choice.few = swap ? SwapWork(facts, choice.all_few ? longest : -1)
                      : SplitWork(p, large_split ? LargeSplitQTileRows(p) : kSplitQTileRows);
    if (choice.few.copies && !HasLargeHeads(p)) {
      choice.why_not[kFew] = WhyNoCacheBoxes(p, 8);  // why they have to
    }
    choice.few_takes_rest = choice.few_chunks && choice.engines[kMany] != nullptr;
    choice.make_plan =
        swap && (choice.all_few ? facts.num_sequences <= kMaxOwnSequences
                                : choice.few_takes_rest &&
                                      FitsOwnPlan(choice.many, facts.num_sequences, p.num_tokens));
  }
  return choice;
}

void AddKernels(const Choice& choice, flashxla_needs* needs) {
  const Engine &few = choice.Of(kFew), &many = choice.Of(kMany), &rest = choice.Of(kRest);
  if (choice.all_few) {
    AddKernel(needs, {"all queries", few.name, FewDescription(choice), choice.why_not[kFew]});
  } else if (choice.one_kernel) {
    AddKernel(needs, {"all queries", many.name, ManyDescription(choice), WhyOneKernel(choice)});
    if (&many != &rest) AddKernel(needs, {"other sequences", rest.name, rest.description, ""});
  } else if (&few == &many) {
    AddKernel(needs, {"all queries", many.name, ManyDescription(choice), choice.why_not[kMany]});
  } else {
    AddKernel(needs, {"few queries", few.name, FewDescription(choice), choice.why_not[kFew]});
    AddKernel(needs, {"many queries", many.name, ManyDescription(choice), choice.why_not[kMany]});
    if (&rest != &few && &rest != &many) {
      AddKernel(needs, {"other sequences", rest.name, rest.description, ""});
    }
  }
}

}  // namespace flashxla::attention
