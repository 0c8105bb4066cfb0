// Softmax attention over ragged batches: the C ABI's function.
#include <cinttypes>

#include "common/attention_arguments.h"
#include "common/error.h"
#include "cuda/attention/engines.h"
#include "cuda/attention/plan.cuh"
#include "cuda/check.h"
#include "flashxla/attention.h"

namespace flashxla::attention {
namespace {

int64_t BytesOf(const flashxla_tensor& t) {
  if (t.data == nullptr) return 0;
  int64_t bytes = ElementSize(t.dtype);
  for (int64_t i = 0; i < t.rank; ++i) bytes *= t.shape[i];
  return bytes;
}

flashxla_status CheckRoom(const char* what, const flashxla_tensor& t, int64_t needed) {
  if (BytesOf(t) >= needed) return FLASHXLA_OK;
  return SetError(FLASHXLA_INVALID_ARGUMENT, "%s has %" PRId64 " bytes, %" PRId64 " are needed",
                  what, BytesOf(t), needed);
}

flashxla_status CheckArguments(const flashxla_attention_args& args) {
  const int64_t out = args.out.dtype;
  if (out != FLASHXLA_F32 && out != FLASHXLA_F16 && out != FLASHXLA_BF16) {
    return SetError(FLASHXLA_INVALID_ARGUMENT, "attention: unsupported dtype of out");
  }
  return CheckAttentionArguments(args);
}

// What the plan of a call is made from; the plan's address is still missing.
PlanProblem PlanOf(const flashxla_attention_args& args, const Problem& p, const Choice& choice) {
  PlanProblem plan = {};
  plan.index = IndexTensorsOf(args);
  plan.window = p.window;
  plan.group_size = p.group_size * choice.few.heads_together;
  plan.roles = choice.Roles();
  plan.want_slots = args.key.data != nullptr && args.slot_mapping.data == nullptr;
  plan.few = choice.few;
  plan.many = choice.many;
  plan.rest_q_tile_rows = choice.rest_q_tile_rows;
  return plan;
}

int64_t PlanBytes(const PlanProblem& plan) {
  return plan.layout().words() * int64_t{sizeof(int32_t)};
}

flashxla_status MakePlan(const PlanProblem& plan, cudaStream_t stream) {
  LaunchPlan(plan, stream);
  if (plan.want_slots) LaunchSlots(plan, stream);
  return LaunchStatus("attention_plan");
}

// What an engine needs of the workspace.
int64_t WorkspaceOf(int role, const Problem& p, const Choice& choice) {
  const Engine* engine = choice.engines[role];
  return choice.Runs(role) && engine->workspace_bytes ? engine->workspace_bytes(p) : 0;
}

// Where the engine of a role has its part of the workspace; after all roles, its end.
int64_t WorkspaceStart(int role, const Problem& p, const Choice& choice) {
  int64_t bytes = 0;
  for (int before = 0; before < role; ++before) bytes += WorkspaceOf(before, p, choice);
  return bytes;
}

int64_t WorkspaceBytes(const Problem& p, const Choice& choice) {
  return WorkspaceStart(kNumRoles, p, choice);
}

// Whether a role's engine works at a call's addresses as it does at those that a plan assumes.
bool WorksAsPlanned(const Problem& p, const Choice& choice, int role) {
  if (role == kFew) return !choice.few.combines || choice.few.copies || !MustCopyFew(p);
  return role != kMany || WideWork(p).odd_heads == choice.many.odd_heads;
}

// The tensor whose address a plan did not expect; null if there is none.
const char* Misaligned(const Problem& p) {
  auto misaligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 != 0; };
  return misaligned(p.q.data)     ? "q"
         : misaligned(p.k.data)   ? "k"
         : misaligned(p.v.data)   ? "v"
         : misaligned(p.out.data) ? "out"
                                  : nullptr;
}

// The engines of a plan are chosen before the addresses are known, for aligned tensors. Refuses a
// call whose tensors the chosen engines cannot take.
flashxla_status CheckPlanned(const Facts& facts, const Choice& choice) {
  const char* which = Misaligned(facts.problem);
  for (int role = 0; role < kNumRoles; ++role) {
    if (!choice.Runs(role)) continue;
    const char* why = choice.engines[role]->why_not(facts);
    const bool as_planned = which == nullptr || WorksAsPlanned(facts.problem, choice, role);
    if (why[0] == '\0' && as_planned) continue;
    if (which == nullptr) {
      return SetError(FLASHXLA_INTERNAL, "the program was compiled for another call: %s", why);
    }
    return SetError(FLASHXLA_INVALID_ARGUMENT,
                    "%s starts at an address that is not a multiple of 16 bytes, for which the "
                    "program was not compiled",
                    which);
  }
  return FLASHXLA_OK;
}

// Writes the new keys and values into the cache.
flashxla_status WriteNewKeys(const flashxla_attention_args& args, const PlanProblem& plan,
                             const flashxla_context& context) {
  flashxla_kv_cache_args write = WriteOf(args);
  flashxla_context write_context = context;
  if (plan.want_slots) {
    int32_t* slots = plan.plan + plan.layout().slots();
    write.slot_mapping = {slots, FLASHXLA_I64, 1, {plan.index.num_tokens}, {1}};
    write_context.check_indices = 0;  // the plan's slots are sound
  }
  return flashxla_cuda_kv_cache(&write, &write_context);
}

flashxla_status RunEngines(const Problem& p, const Choice& choice, void* workspace,
                           cudaStream_t stream) {
  // Most of the work comes first; what the next engine does then fills the gaps at its end.
  for (const Role role : {kMany, kFew, kRest}) {
    if (!choice.Runs(role)) continue;
    void* own = static_cast<char*>(workspace) + WorkspaceStart(role, p, choice);
    flashxla_status status = choice.engines[role]->launch(p, own, stream);
    // The next engine may not wait for what came before this one: see few_follows.
    if (status == FLASHXLA_OK) status = LaunchStatus("attention");
    if (status != FLASHXLA_OK) return status;
  }
  if (!choice.few.combines) LaunchCombine(p, workspace, stream);
  return LaunchStatus("attention");
}

flashxla_status Run(const flashxla_attention_args& args, const flashxla_context& context,
                    const Choice& choice, PlanProblem plan) {
  const bool planned = args.plan.data != nullptr;
  const Facts facts = FactsOf(args, false);
  Problem p = facts.problem;
  SetFew(choice.few, &p);
  p.roles = plan.roles;
  const int64_t partial_bytes = WorkspaceBytes(p, choice);
  const int64_t plan_bytes = PlanBytes(plan);
  flashxla_status status = planned ? CheckPlanned(facts, choice) : FLASHXLA_OK;
  if (planned && status == FLASHXLA_OK) status = CheckRoom("plan", args.plan, plan_bytes);
  if (status == FLASHXLA_OK) {
    status = CheckRoom("workspace", args.workspace, partial_bytes + (planned ? 0 : plan_bytes));
  }
  if (status != FLASHXLA_OK) return status;
  const cudaStream_t stream = StreamOf(&context);
  if (planned) {
    plan.plan = static_cast<int32_t*>(args.plan.data);
  } else {
    plan.plan = reinterpret_cast<int32_t*>(static_cast<char*>(args.workspace.data) + partial_bytes);
    p.makes_plan = choice.make_plan && !plan.want_slots;
    if (!p.makes_plan) status = MakePlan(plan, stream);
    if (status != FLASHXLA_OK) return status;
  }
  p.plan = PlanView(plan.plan, plan.layout());
  p.few_follows = choice.FewFollows();
  if (p.makes_plan && p.few_follows) p.few_left = plan.plan;  // where nothing else is then
  if (args.key.data != nullptr) {
    status = WriteNewKeys(args, plan, context);
    if (status != FLASHXLA_OK) return status;
  }
  if (p.num_heads == 0) return FLASHXLA_OK;
  return RunEngines(p, choice, args.workspace.data, stream);
}

flashxla_status Attend(const flashxla_attention_args& args, const flashxla_context& context) {
  flashxla_status status = CheckArguments(args);
  if (status != FLASHXLA_OK) return status;
  const bool planned = args.plan.data != nullptr || context.prepare;
  Facts facts = FactsOf(args, planned);
  const Choice choice = ChooseEngines(facts);
  PlanProblem plan = PlanOf(args, facts.problem, choice);
  if (context.needs != nullptr) {
    SetFew(choice.few, &facts.problem);
    *context.needs = {};
    context.needs->plan_bytes = PlanBytes(plan);
    context.needs->workspace_bytes =
        WorkspaceBytes(facts.problem, choice) + (planned ? 0 : PlanBytes(plan));
    AddKernels(choice, context.needs);
    return FLASHXLA_OK;
  }
  const bool idle = args.q.shape[0] == 0 || (args.q.shape[1] == 0 && args.key.data == nullptr);
  if (context.prepare) {
    if (idle) return FLASHXLA_OK;
    status = CheckRoom("plan", args.plan, PlanBytes(plan));
    if (status != FLASHXLA_OK) return status;
    plan.plan = static_cast<int32_t*>(args.plan.data);
    return MakePlan(plan, StreamOf(&context));
  }
  status = CheckAttention(args, &context);
  if (status != FLASHXLA_OK || idle) return status;
  return Run(args, context, choice, plan);
}

}  // namespace
}  // namespace flashxla::attention

flashxla_status flashxla_cuda_attention(const flashxla_attention_args* args,
                                        const flashxla_context* context) {
  using namespace flashxla;
  return Guarded("attention", [&] { return attention::Attend(Unpacked(*args), *context); });
}
