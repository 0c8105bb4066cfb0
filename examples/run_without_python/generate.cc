#include "generate.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace example {
namespace {

struct Sequence {
  std::vector<int64_t> tokens;  // the prompt, and then what was generated
  size_t prompt_tokens;
  int64_t max_tokens;           // with the prompt
  std::vector<int64_t> blocks;  // of the cache, enough for max_tokens
  int64_t computed = 0;         // tokens whose keys and values are in the cache
  bool finished = false;

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
};

// The tokens [start, start + count) of a sequence, computed in one step.
struct Chunk {
  Sequence* sequence;
  int64_t count;
};

int64_t Blocks(const Manifest& manifest, int64_t tokens) {
  return (tokens + manifest.block_size - 1) / manifest.block_size;
}

// Gives each sequence the blocks that it will need at most.
std::vector<Sequence> MakeSequences(const Manifest& manifest,
                                    const std::vector<std::vector<int64_t>>& prompts,
                                    const Options& options) {
  if (static_cast<int64_t>(prompts.size()) > manifest.max_seqs) {
    throw std::runtime_error("got " + std::to_string(prompts.size()) +
                             " prompts; accepted: at most " + std::to_string(manifest.max_seqs));
  }
  std::vector<Sequence> sequences;
  int64_t next_block = 0;
  for (const auto& prompt : prompts) {
    const auto length = static_cast<int64_t>(prompt.size());
    if (length == 0 || length >= manifest.max_length) {
      throw std::runtime_error("got a prompt of " + std::to_string(length) +
                               " tokens; accepted: 1 to " +
                               std::to_string(manifest.max_length - 1));
    }
    for (int64_t token : prompt) {
      if (token >= 0 && token < manifest.vocabulary) continue;
      throw std::runtime_error("got token " + std::to_string(token) + "; accepted: tokens below " +
                               std::to_string(manifest.vocabulary) +
                               ", which is how many the model has");
    }
    const int64_t longest = std::min(length + options.max_new_tokens, manifest.max_length);
    Sequence sequence = {prompt, prompt.size(), longest, {}};
    for (int64_t i = 0; i < Blocks(manifest, longest); ++i) sequence.blocks.push_back(next_block++);
    sequences.push_back(std::move(sequence));
  }
  if (next_block > manifest.num_blocks) {
    throw std::runtime_error("the prompts and their texts need " + std::to_string(next_block) +
                             " blocks of the cache; accepted: at most " +
                             std::to_string(manifest.num_blocks) +
                             " (flashxla export --num-blocks)");
  }
  return sequences;
}

// What the next step computes: of each sequence as much as there is room for.
std::vector<Chunk> Schedule(std::vector<Sequence>& sequences, int64_t room) {
  std::vector<Chunk> chunks;
  for (Sequence& sequence : sequences) {
    const int64_t count = std::min(sequence.length() - sequence.computed, room);
    if (sequence.finished || count == 0) continue;
    chunks.push_back({&sequence, count});
    room -= count;
  }
  return chunks;
}

int64_t Tokens(const std::vector<Chunk>& chunks) {
  int64_t sum = 0;
  for (const Chunk& chunk : chunks) sum += chunk.count;
  return sum;
}

// Pads each input of the step to the program's shape.
Inputs MakeInputs(const Manifest& manifest, int64_t tokens, const std::vector<Chunk>& chunks) {
  const auto sequences = static_cast<size_t>(manifest.max_seqs);
  const auto width = static_cast<size_t>(Blocks(manifest, manifest.max_length));
  std::vector<int64_t> ids, positions, tables, context_lens, starts = {0}, rows;
  for (const Chunk& chunk : chunks) {
    const Sequence& sequence = *chunk.sequence;
    for (int64_t at = sequence.computed; at < sequence.computed + chunk.count; ++at) {
      ids.push_back(sequence.tokens[at]);
      positions.push_back(at);
    }
    tables.insert(tables.end(), sequence.blocks.begin(), sequence.blocks.end());
    tables.resize((starts.size()) * width);
    context_lens.push_back(sequence.computed + chunk.count);
    starts.push_back(static_cast<int64_t>(ids.size()));
    rows.push_back(static_cast<int64_t>(ids.size()) - 1);
  }
  const auto end = static_cast<int64_t>(ids.size());
  ids.resize(tokens);
  positions.resize(tokens);
  tables.resize(sequences * width);
  context_lens.resize(sequences);
  starts.resize(sequences + 1, end);
  rows.resize(sequences);
  return {{"input_ids", ids},          {"position_ids", positions},
          {"block_tables", tables},    {"context_lens", context_lens},
          {"query_start_loc", starts}, {"num_seqs", {static_cast<int64_t>(chunks.size())}},
          {"logits_rows", rows}};
}

}  // namespace

Generated Generate(Model& model, const Manifest& manifest,
                   const std::vector<std::vector<int64_t>>& prompts, const Options& options) {
  std::vector<Sequence> sequences = MakeSequences(manifest, prompts, options);
  const auto& programs = manifest.programs;
  Generated generated;
  for (;;) {
    const auto chunks = Schedule(sequences, programs.back().tokens);
    if (chunks.empty()) break;
    size_t index = 0;
    while (programs[index].tokens < Tokens(chunks)) ++index;
    const auto logits = model.Step(index, MakeInputs(manifest, programs[index].tokens, chunks));
    const size_t vocabulary = logits.size() / static_cast<size_t>(manifest.max_seqs);
    ++generated.steps;
    for (size_t row = 0; row < chunks.size(); ++row) {
      Sequence& sequence = *chunks[row].sequence;
      sequence.computed += chunks[row].count;
      if (sequence.computed < sequence.length()) continue;  // more of the prompt is to come
      const auto first = logits.begin() + static_cast<ptrdiff_t>(row * vocabulary);
      const auto last = first + static_cast<ptrdiff_t>(vocabulary);
      if (!std::all_of(first, last, [](float logit) { return std::isfinite(logit); })) {
        throw std::runtime_error("got NaN or infinite logits for prompt " +
                                 std::to_string(chunks[row].sequence - sequences.data() + 1));
      }
      const int64_t token = std::max_element(first, last) - first;
      sequence.tokens.push_back(token);
      const auto& eos = manifest.eos_tokens;
      const bool ends =
          !options.ignore_eos && std::find(eos.begin(), eos.end(), token) != eos.end();
      sequence.finished = ends || sequence.length() >= sequence.max_tokens;
    }
  }
  for (const Sequence& sequence : sequences) {
    generated.tokens.emplace_back(
        sequence.tokens.begin() + static_cast<ptrdiff_t>(sequence.prompt_tokens),
        sequence.tokens.end());
  }
  return generated;
}

}  // namespace example
