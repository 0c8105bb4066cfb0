#include "model.h"

#include <fstream>
#include <stdexcept>

namespace example {
namespace {

std::vector<char> ReadWeight(const std::string& path, const Tensor& weight) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> data(weight.bytes);
  file.seekg(weight.offset);
  if (!file.read(data.data(), static_cast<std::streamsize>(data.size()))) {
    throw std::runtime_error(path + ": the weight " + weight.name + " cannot be read");
  }
  return data;
}

}  // namespace

Model::Model(const Device& device, const std::string& folder, const Manifest& manifest)
    : device_(&device), manifest_(&manifest) {
  for (const StepProgram& program : manifest.programs) {
    const std::string path = folder + "/" + program.file;
    const std::string code = ReadFile(path);
    try {
      executables_.push_back(device.Compile(code, program.results.size()));
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(path + ": " + error.what());
    }
  }
  // All programs have the same weights and caches.
  for (const Tensor& tensor : manifest.programs[0].arguments) {
    if (tensor.kind == "weight") {
      const auto data = ReadWeight(folder + "/" + manifest.weights, tensor);
      weights_.emplace(tensor.name, device.CopyFromHost(data.data(), tensor.type, tensor.shape));
    } else if (tensor.kind == "cache") {
      const std::vector<char> zeros(tensor.bytes);
      Buffer cache = device.CopyFromHost(zeros.data(), tensor.type, tensor.shape);
      first_addresses_[tensor.name] = cache.address();
      caches_.emplace(tensor.name, std::move(cache));
    }
  }
}

std::vector<float> Model::Step(size_t index, const Inputs& inputs) {
  const StepProgram& program = manifest_->programs[index];
  std::vector<Buffer> of_step;  // they live as long as the call
  std::vector<pjrt::Buffer*> arguments;
  for (const Tensor& tensor : program.arguments) {
    if (tensor.kind == "weight") {
      arguments.push_back(weights_.at(tensor.name).get());
    } else if (tensor.kind == "cache") {
      arguments.push_back(caches_.at(tensor.name).get());
    } else {
      of_step.push_back(CopyInput(tensor, inputs));
      arguments.push_back(of_step.back().get());
    }
  }
  const std::vector<Buffer> results = executables_[index].Execute(arguments);
  std::vector<float> logits;
  for (size_t i = 0; i < results.size(); ++i) {
    const Tensor& tensor = program.results[i];
    if (tensor.kind == "cache") {
      caches_.at(tensor.name) = results[i];
    } else {
      logits.resize(tensor.bytes / sizeof(float));
      results[i].CopyToHost(logits.data(), tensor.bytes);
    }
  }
  return logits;
}

Buffer Model::CopyInput(const Tensor& tensor, const Inputs& inputs) const {
  const auto found = inputs.find(tensor.name);
  if (found == inputs.end()) {
    throw std::runtime_error("manifest.json: it has the unknown input " + tensor.name);
  }
  const std::vector<int64_t>& wide = found->second;
  if (tensor.type == pjrt::kBufferI64 && tensor.bytes == wide.size() * sizeof(int64_t)) {
    return device_->CopyFromHost(wide.data(), tensor.type, tensor.shape);
  }
  if (tensor.type == pjrt::kBufferI32 && tensor.bytes == wide.size() * sizeof(int32_t)) {
    const std::vector<int32_t> narrow(wide.begin(), wide.end());
    return device_->CopyFromHost(narrow.data(), tensor.type, tensor.shape);
  }
  throw std::runtime_error(
      "manifest.json: the input " + tensor.name + " has " + std::to_string(tensor.bytes) +
      " bytes; accepted: " + std::to_string(wide.size()) + " numbers, I32 or I64");
}

bool Model::caches_in_place() const {
  for (const auto& [name, cache] : caches_) {
    if (cache.address() != first_addresses_.at(name)) return false;
  }
  return true;
}

}  // namespace example
