#include "manifest.h"

#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>

#include "json.h"
#include "pjrt/pjrt_abi.h"

namespace example {
namespace {

namespace pjrt = flashxla::pjrt;

constexpr int64_t kFormat = 1;

struct Dtype {
  int32_t type;
  size_t bytes;
};

Dtype DtypeOf(const std::string& name) {
  static const auto* dtypes = new std::map<std::string, Dtype>{
      {"BOOL", {pjrt::kBufferBool, 1}},      {"I8", {pjrt::kBufferI8, 1}},
      {"I16", {pjrt::kBufferI16, 2}},        {"I32", {pjrt::kBufferI32, 4}},
      {"I64", {pjrt::kBufferI64, 8}},        {"U8", {pjrt::kBufferU8, 1}},
      {"F16", {pjrt::kBufferF16, 2}},        {"BF16", {pjrt::kBufferBF16, 2}},
      {"F32", {pjrt::kBufferF32, 4}},        {"F64", {pjrt::kBufferF64, 8}},
      {"F8_E4M3", {pjrt::kBufferF8E4M3, 1}}, {"F8_E5M2", {pjrt::kBufferF8E5M2, 1}},
  };
  const auto found = dtypes->find(name);
  if (found == dtypes->end()) throw std::runtime_error("it has the unknown dtype " + name);
  return found->second;
}

Tensor ReadTensor(const Json& json) {
  const Dtype dtype = DtypeOf(json["dtype"].string());
  Tensor tensor = {json["kind"].string(),
                   json["name"].string(),
                   dtype.type,
                   dtype.bytes,
                   json["shape"].integers(),
                   json.has("offset") ? json["offset"].integer() : 0};
  for (int64_t size : tensor.shape) tensor.bytes *= size;
  return tensor;
}

StepProgram ReadProgram(const Json& json) {
  StepProgram program = {json["file"].string(), json["tokens"].integer(), {}, {}};
  for (const Json& one : json["arguments"].array()) program.arguments.push_back(ReadTensor(one));
  for (const Json& one : json["results"].array()) program.results.push_back(ReadTensor(one));
  return program;
}

Manifest Read(const Json& json) {
  if (const int64_t format = json["format"].integer(); format != kFormat) {
    throw std::runtime_error("got format " + std::to_string(format) +
                             "; accepted: " + std::to_string(kFormat));
  }
  Manifest manifest;
  manifest.platform = json["platform"].string();
  for (const Json& one : json["custom_calls"].array()) {
    manifest.custom_calls.push_back(one.string());
  }
  manifest.weights = json["weights"].string();
  manifest.block_size = json["block_size"].integer();
  manifest.num_blocks = json["num_blocks"].integer();
  manifest.max_seqs = json["max_seqs"].integer();
  manifest.max_length = json["max_length"].integer();
  manifest.vocabulary = json["vocabulary"].integer();
  manifest.eos_tokens = json["eos_tokens"].integers();
  if (!json["bytes_prefix"].is_null()) manifest.bytes_prefix = json["bytes_prefix"].integers();
  for (const Json& one : json["programs"].array()) manifest.programs.push_back(ReadProgram(one));
  if (manifest.programs.empty()) throw std::runtime_error("it names no program");
  return manifest;
}

}  // namespace

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file || !text) throw std::runtime_error(path + ": cannot be read");
  return text.str();
}

Manifest ReadManifest(const std::string& folder) {
  const std::string path = folder + "/manifest.json";
  const std::string text = ReadFile(path);
  try {
    return Read(Json::Parse(text));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

}  // namespace example
