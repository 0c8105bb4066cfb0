// Greedy generation for a batch of prompts, with a paged cache.
#ifndef RUN_WITHOUT_PYTHON_GENERATE_H_
#define RUN_WITHOUT_PYTHON_GENERATE_H_

#include <cstdint>
#include <vector>

#include "manifest.h"
#include "model.h"

namespace example {

struct Options {
  int64_t max_new_tokens = 64;
  bool ignore_eos = false;
};

struct Generated {
  std::vector<std::vector<int64_t>> tokens;  // of each prompt, without the prompt
  int64_t steps = 0;
};

// Prompts are tokens. Throws std::runtime_error for prompts that the model or its cache cannot
// hold, before anything runs.
Generated Generate(Model& model, const Manifest& manifest,
                   const std::vector<std::vector<int64_t>>& prompts, const Options& options);

}  // namespace example

#endif  // RUN_WITHOUT_PYTHON_GENERATE_H_
