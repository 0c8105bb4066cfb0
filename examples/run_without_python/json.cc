#include "json.h"

#include <cctype>
#include <cstdlib>
#include <stdexcept>

namespace example {

class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : text_(text) {}

  Json Document() {
    Json value = Value();
    SkipSpace();
    if (at_ != text_.size()) Fail("more text after the end");
    return value;
  }

 private:
  [[noreturn]] void Fail(const std::string& what) const {
    throw std::runtime_error("no JSON: " + what + " at byte " + std::to_string(at_));
  }

  void SkipSpace() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }

  bool Take(char wanted) {
    SkipSpace();
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  void Expect(char wanted) {
    if (!Take(wanted)) Fail(std::string("no '") + wanted + "'");
  }

  bool TakeWord(const std::string& word) {
    if (text_.compare(at_, word.size(), word) != 0) return false;
    at_ += word.size();
    return true;
  }

  Json Value() {
    Json value;
    SkipSpace();
    if (Take('{')) {
      value.kind_ = Json::Kind::kObject;
      for (bool more = !Take('}'); more; more = More('}')) {
        SkipSpace();
        const std::string name = String();
        Expect(':');
        value.members_[name] = Value();
      }
    } else if (Take('[')) {
      value.kind_ = Json::Kind::kArray;
      for (bool more = !Take(']'); more; more = More(']')) value.array_.push_back(Value());
    } else if (at_ < text_.size() && text_[at_] == '"') {
      value.kind_ = Json::Kind::kString;
      value.string_ = String();
    } else if (TakeWord("true") || TakeWord("false")) {
      value.kind_ = Json::Kind::kBool;
    } else if (!TakeWord("null")) {
      value.kind_ = Json::Kind::kNumber;
      char* end = nullptr;
      value.number_ = std::strtod(text_.c_str() + at_, &end);
      if (end == text_.c_str() + at_) Fail("no value");
      at_ = end - text_.c_str();
    }
    return value;
  }

  // Whether another element follows, or the closing bracket.
  bool More(char closing) {
    if (Take(',')) return true;
    Expect(closing);
    return false;
  }

  std::string String() {
    Expect('"');
    std::string value;
    while (at_ < text_.size() && text_[at_] != '"') {
      char next = text_[at_++];
      if (next == '\\') {
        if (at_ == text_.size()) break;
        next = text_[at_++];
        // The manifest's strings are names and file names: it needs no others.
        if (next != '"' && next != '\\' && next != '/') Fail("an escape that is not supported");
      }
      value += next;
    }
    Expect('"');
    return value;
  }

  const std::string& text_;
  size_t at_ = 0;
};

Json Json::Parse(const std::string& text) { return JsonReader(text).Document(); }

int64_t Json::integer() const {
  const auto value = static_cast<int64_t>(number_);
  if (kind_ != Kind::kNumber || static_cast<double>(value) != number_) {
    throw std::runtime_error("got another value; accepted: a whole number");
  }
  return value;
}

const std::string& Json::string() const {
  if (kind_ != Kind::kString) throw std::runtime_error("got another value; accepted: a string");
  return string_;
}

const std::vector<Json>& Json::array() const {
  if (kind_ != Kind::kArray) throw std::runtime_error("got another value; accepted: an array");
  return array_;
}

const Json& Json::operator[](const std::string& name) const {
  const auto member = members_.find(name);
  if (member == members_.end()) throw std::runtime_error("it has no \"" + name + "\"");
  return member->second;
}

std::vector<int64_t> Json::integers() const {
  std::vector<int64_t> values;
  for (const Json& element : array()) values.push_back(element.integer());
  return values;
}

}  // namespace example
