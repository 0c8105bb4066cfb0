// A model on the device: its programs, weights and caches.
#ifndef RUN_WITHOUT_PYTHON_MODEL_H_
#define RUN_WITHOUT_PYTHON_MODEL_H_

#include <map>
#include <string>
#include <vector>

#include "manifest.h"
#include "plugin.h"

namespace example {

// The inputs of a step by name: the numbers of each, row by row.
using Inputs = std::map<std::string, std::vector<int64_t>>;

class Model {
 public:
  // Compiles the programs, loads the weights and makes empty caches. All of it stays on the device.
  Model(const Device& device, const std::string& folder, const Manifest& manifest);

  // Runs the step of programs[index]. Returns the logits, [max_seqs, vocabulary]. The program takes
  // the caches over and gives them back, in the same memory.
  std::vector<float> Step(size_t index, const Inputs& inputs);

  // Whether every cache still lies where it was made.
  bool caches_in_place() const;

 private:
  Buffer CopyInput(const Tensor& tensor, const Inputs& inputs) const;

  const Device* device_;
  const Manifest* manifest_;
  std::vector<Executable> executables_;
  std::map<std::string, Buffer> weights_;
  std::map<std::string, Buffer> caches_;
  std::map<std::string, uintptr_t> first_addresses_;
};

}  // namespace example

#endif  // RUN_WITHOUT_PYTHON_MODEL_H_
