// Generates text with a program that `flashxla export` wrote: no Python, no JAX, no PyTorch.
// docs/without-python.md explains how it is put together.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "generate.h"
#include "manifest.h"
#include "model.h"
#include "plugin.h"

namespace example {
namespace {

constexpr char kUsage[] =
    "usage: run_without_python --program DIR --plugin FILE --library FILE [options]\n"
    "  --program DIR        what `flashxla export --output DIR` wrote\n"
    "  --plugin FILE        a PJRT plugin, for the platform that the program was exported for\n"
    "  --library FILE       flashxla's library for it: libflashxla_cpu.so or libflashxla_cuda.so\n"
    "  --prompt TEXT        for a model whose tokens are bytes; more than one may be given\n"
    "  --prompt-ids 1,2,3   tokens of a prompt, for all models; more than one may be given\n"
    "  --max-new-tokens N   (default 64)\n"
    "  --ignore-eos         go on after the model ends the text\n"
    "  --ids                print the tokens instead of the text\n";

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

struct Prompt {
  std::string text;
  bool is_ids;
};

struct CommandLine {
  std::string program, plugin, library;
  std::vector<Prompt> prompts;
  Options options;
  bool ids = false;
};

int64_t Number(const std::string& option, const std::string& text, int64_t smallest) {
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < smallest) {
    throw std::invalid_argument(option + ": got '" + text +
                                "'; accepted: a whole number >= " + std::to_string(smallest));
  }
  return value;
}

CommandLine Parse(int argc, char** argv) {
  CommandLine line;
  for (int at = 1; at < argc; ++at) {
    const std::string option = argv[at];
    if (option == "--ignore-eos" || option == "--ids") {
      (option == "--ids" ? line.ids : line.options.ignore_eos) = true;
      continue;
    }
    if (option == "--help") {
      std::fputs(kUsage, stdout);
      std::exit(0);
    }
    if (at + 1 == argc) throw std::invalid_argument(option + ": unknown, or its value is missing");
    const std::string value = argv[++at];
    if (option == "--program") {
      line.program = value;
    } else if (option == "--plugin") {
      line.plugin = value;
    } else if (option == "--library") {
      line.library = value;
    } else if (option == "--prompt" || option == "--prompt-ids") {
      line.prompts.push_back({value, option == "--prompt-ids"});
    } else if (option == "--max-new-tokens") {
      line.options.max_new_tokens = Number(option, value, 1);
    } else {
      throw std::invalid_argument(option + ": unknown");
    }
  }
  if (line.program.empty()) throw std::invalid_argument("--program: missing");
  if (line.plugin.empty()) throw std::invalid_argument("--plugin: missing");
  if (line.library.empty()) throw std::invalid_argument("--library: missing");
  if (line.prompts.empty()) throw std::invalid_argument("--prompt: missing");
  return line;
}

std::vector<int64_t> Encode(const Manifest& manifest, const Prompt& prompt) {
  std::vector<int64_t> tokens;
  if (prompt.is_ids) {
    std::istringstream list(prompt.text);
    for (std::string id; std::getline(list, id, ',');) {
      tokens.push_back(Number("--prompt-ids", id, 0));
    }
  } else if (manifest.bytes_prefix) {
    tokens = *manifest.bytes_prefix;
    for (unsigned char byte : prompt.text) tokens.push_back(byte);
  } else {
    throw std::runtime_error(
        "--prompt: got text with a model whose tokens are not bytes; accepted: --prompt-ids, "
        "from the model's tokenizer");
  }
  return tokens;
}

void Print(const Manifest& manifest, const std::vector<int64_t>& tokens, bool ids) {
  if (ids || !manifest.bytes_prefix) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      std::printf("%s%lld", i == 0 ? "" : ",", static_cast<long long>(tokens[i]));
    }
  } else {
    for (int64_t token : tokens) {
      if (token < 256) std::putchar(static_cast<int>(token));
    }
  }
  std::putchar('\n');
}

// Makes sure that the plugin, the library and the program are of one platform.
void Check(const Manifest& manifest, const Device& device, const std::vector<std::string>& found) {
  if (device.platform() != manifest.platform) {
    throw std::runtime_error("--plugin: got one for " + device.platform() + "; accepted: one for " +
                             manifest.platform + ", which the program was exported for");
  }
  for (const std::string& wanted : manifest.custom_calls) {
    if (wanted.rfind("flashxla_", 0) != 0) continue;  // one of XLA's own
    bool there = false;
    for (const std::string& name : found) there = there || name == wanted;
    if (!there) {
      throw std::runtime_error("--library: it has no " + wanted +
                               ", which the program calls: it is of another version of flashxla");
    }
  }
}

int Run(const CommandLine& line) {
  const auto started = Clock::now();
  const Manifest manifest = ReadManifest(line.program);
  std::vector<std::vector<int64_t>> prompts;
  for (const Prompt& prompt : line.prompts) prompts.push_back(Encode(manifest, prompt));

  const Plugin plugin(line.plugin);
  const auto custom_calls =
      plugin.RegisterCustomCalls(line.library, manifest.platform == "cpu" ? "Host" : "CUDA");
  const Device device(plugin);
  Check(manifest, device, custom_calls);
  Model model(device, line.program, manifest);
  std::fprintf(stderr, "%s: %zu programs compiled, weights loaded: %.2f s\n",
               manifest.platform.c_str(), manifest.programs.size(), Seconds(started));

  const auto generating = Clock::now();
  const Generated generated = Generate(model, manifest, prompts, line.options);
  const double seconds = Seconds(generating);
  size_t tokens = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (!line.ids) std::printf("--- prompt %zu\n", i + 1);
    if (!line.ids && !line.prompts[i].is_ids) std::printf("%s", line.prompts[i].text.c_str());
    Print(manifest, generated.tokens[i], line.ids);
    tokens += generated.tokens[i].size();
  }
  std::fprintf(stderr, "%zu tokens in %.2f s: %.1f tokens/s; %lld steps; caches %s\n", tokens,
               seconds, static_cast<double>(tokens) / seconds,
               static_cast<long long>(generated.steps),
               model.caches_in_place() ? "in place" : "MOVED");
  return 0;
}

}  // namespace
}  // namespace example

int main(int argc, char** argv) {
  try {
    return example::Run(example::Parse(argc, argv));
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "run_without_python: error: %s\n%s", error.what(), example::kUsage);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "run_without_python: error: %s\n", error.what());
  }
  return 2;
}
