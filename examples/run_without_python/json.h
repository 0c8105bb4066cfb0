// Reads JSON, as much of it as manifest.json needs: one file, so that the example needs no library.
#ifndef RUN_WITHOUT_PYTHON_JSON_H_
#define RUN_WITHOUT_PYTHON_JSON_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace example {

class Json {
 public:
  // Throws std::runtime_error for text that is no JSON.
  static Json Parse(const std::string& text);

  bool is_null() const { return kind_ == Kind::kNull; }
  // The value, if it is of that kind; else these throw std::runtime_error.
  int64_t integer() const;
  const std::string& string() const;
  const std::vector<Json>& array() const;
  // The member of an object.
  const Json& operator[](const std::string& name) const;
  bool has(const std::string& name) const { return members_.count(name) != 0; }
  std::vector<int64_t> integers() const;

 private:
  friend class JsonReader;
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };

  Kind kind_ = Kind::kNull;
  double number_ = 0;
  std::string string_;
  std::vector<Json> array_;
  std::map<std::string, Json> members_;
};

}  // namespace example

#endif  // RUN_WITHOUT_PYTHON_JSON_H_
