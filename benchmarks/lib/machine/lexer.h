#pragma once
// Words of PTX, one at a time, with their lines.

#include <cctype>
#include <string>
#include <string_view>

#include "ptx.h"

namespace machine {

class Lexer {
 public:
  explicit Lexer(const std::string& text) : text_(text) { advance(); }

  std::string_view peek() const { return word_; }
  bool at(std::string_view word) const { return word_ == word; }
  bool done() const { return word_.empty(); }
  int line() const { return line_; }

  std::string_view take() {
    const std::string_view word = word_;
    advance();
    return word;
  }

  bool accept(std::string_view word) {
    if (word_ != word) return false;
    advance();
    return true;
  }

  void expect(std::string_view word) {
    if (!accept(word)) fail("expected '" + std::string(word) + "', found '" + std::string(word_) + "'");
  }

  // The rest of the line behind the present word, which goes with it.
  std::string_view rest_of_line() {
    const size_t begin = word_.data() - text_.data(), end = std::min(text_.find('\n', begin), text_.size());
    position_ = end;
    const std::string_view rest(text_.data() + begin, end - begin);
    advance();
    return rest;
  }

  // Everything up to the word that closes what the present word opens.
  void skip_block() {
    int depth = 0;
    do {
      if (done()) fail("a block that does not end");
      depth += at("{") - at("}");
      advance();
    } while (depth > 0);
  }

  void skip_statement() {
    while (!at(";") && !done()) advance();
    accept(";");
  }

  [[noreturn]] void fail(const std::string& message) const {
    throw Malformed{"PTX line " + std::to_string(line_) + ": " + message};
  }

 private:
  static bool in_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
  }

  void skip_space() {
    while (position_ < text_.size()) {
      const char c = text_[position_];
      if (c == '\n') ++next_line_;
      if (std::isspace(static_cast<unsigned char>(c))) {
        ++position_;
      } else if (text_.compare(position_, 2, "//") == 0) {
        position_ = std::min(text_.find('\n', position_), text_.size());
      } else if (text_.compare(position_, 2, "/*") == 0) {
        const size_t end = std::min(text_.find("*/", position_ + 2), text_.size() - 2) + 2;
        for (; position_ < end; ++position_) next_line_ += text_[position_] == '\n';
      } else {
        return;
      }
    }
  }

  void advance() {
    skip_space();
    line_ = next_line_;
    size_t end = position_;
    if (end < text_.size() && text_[end] == '"') {
      end = std::min(text_.find('"', end + 1), text_.size() - 1) + 1;
    } else {
      while (end < text_.size() && in_word(text_[end])) ++end;
      // Names of tensor shapes and cache levels hold "::", as in .shared::cta.
      while (text_.compare(end, 2, "::") == 0) {
        end += 2;
        while (end < text_.size() && in_word(text_[end])) ++end;
      }
      if (end == position_ && end < text_.size()) ++end;
    }
    word_ = std::string_view(text_.data() + position_, end - position_);
    position_ = end;
  }

  const std::string& text_;
  size_t position_ = 0;
  int line_ = 1, next_line_ = 1;
  std::string_view word_;
};

}  // namespace machine
