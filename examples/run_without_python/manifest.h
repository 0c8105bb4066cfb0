// What `flashxla export` says about its programs, in manifest.json.
#ifndef RUN_WITHOUT_PYTHON_MANIFEST_H_
#define RUN_WITHOUT_PYTHON_MANIFEST_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace example {

// An argument or a result of a program.
struct Tensor {
  std::string kind;  // "cache", "weight", "input" or "logits"
  std::string name;
  int32_t type;  // as the PJRT C API numbers it
  size_t bytes;  // of all elements
  std::vector<int64_t> shape;
  int64_t offset;  // of a weight, in the file of the weights
};

// A step of up to `tokens` tokens, padded to that number.
struct StepProgram {
  std::string file;
  int64_t tokens;
  std::vector<Tensor> arguments;
  std::vector<Tensor> results;
};

struct Manifest {
  std::string platform;  // "cpu" or "cuda"
  std::vector<std::string> custom_calls;
  std::string weights;  // the file
  int64_t block_size;
  int64_t num_blocks;
  int64_t max_seqs;
  int64_t max_length;
  int64_t vocabulary;
  std::vector<int64_t> eos_tokens;
  // If the tokens of a text are its bytes: the tokens in front of them.
  std::optional<std::vector<int64_t>> bytes_prefix;
  std::vector<StepProgram> programs;  // by tokens, the smallest first
};

// Reads DIR/manifest.json. Throws std::runtime_error.
Manifest ReadManifest(const std::string& folder);

// A whole file. Throws std::runtime_error.
std::string ReadFile(const std::string& path);

}  // namespace example

#endif  // RUN_WITHOUT_PYTHON_MANIFEST_H_
