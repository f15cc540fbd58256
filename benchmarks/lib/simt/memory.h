// Memory between pages that trap, and what to say of an address that trapped.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace simt {

constexpr unsigned char POISON = 0xff;  // NaN in every floating-point type

size_t page_size();
constexpr size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Pages of which the first and the last cannot be touched.
class Pages {
 public:
  explicit Pages(size_t bytes);  // between them, rounded up to pages
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  char* begin() const { return first + page_size(); }
  char* end() const { return first + total - page_size(); }
  void close(char* from, char* to) const;  // whole pages that must not be touched
  void open(char* from, char* to) const;

 private:
  char* first;
  size_t total;
};

// Bytes inside of pages; what surrounds them there holds POISON.
struct Region {
  char* data = nullptr;
  size_t bytes = 0;
  char *open_begin = nullptr, *open_end = nullptr;  // what can be touched around it

  void poison_margins() const;
  // "was written 4 bytes before its start", or nothing
  std::string damage() const;
  // "12 bytes beyond its end of 4096 bytes"
  std::string describe(const char* address) const;
};

// "an allocation in global memory was written 4 bytes before ...", or nothing; forgets it
std::string damaged_allocation();
// "global memory, 12 bytes beyond the end of ...", or nothing if it is near no allocation
std::string describe_allocation(const char* address);

}  // namespace simt
