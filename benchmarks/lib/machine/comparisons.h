#pragma once
// setp's comparisons of two operands, of integers and of floating-point numbers. With NaN only OrNan's hold.

namespace machine {

struct Equal {
  template <class T>
  static bool run(T a, T b) {
    return a == b;
  }
};
struct Unequal {  // of two numbers: NaN is not unequal to anything
  template <class T>
  static bool run(T a, T b) {
    return a < b || a > b;
  }
};
struct Less {
  template <class T>
  static bool run(T a, T b) {
    return a < b;
  }
};
struct LessEqual {
  template <class T>
  static bool run(T a, T b) {
    return a <= b;
  }
};
struct Greater {
  template <class T>
  static bool run(T a, T b) {
    return a > b;
  }
};
struct GreaterEqual {
  template <class T>
  static bool run(T a, T b) {
    return a >= b;
  }
};
struct Numbers {
  template <class T>
  static bool run(T a, T b) {
    return a == a && b == b;
  }
};
struct Never {
  template <class T>
  static bool run(T, T) {
    return false;
  }
};
template <class F>
struct OrNan {
  template <class T>
  static bool run(T a, T b) {
    return !Numbers::run(a, b) || F::run(a, b);
  }
};

}  // namespace machine
