#pragma once
// Operations that several kinds of numbers share: integers, floating-point numbers, predicates of a warp.

namespace machine {

struct Add {
  template <class T>
  static T run(T a, T b) {
    return a + b;
  }
};
struct Sub {
  template <class T>
  static T run(T a, T b) {
    return a - b;
  }
};
struct Mul {
  template <class T>
  static T run(T a, T b) {
    return a * b;
  }
};
struct And {
  template <class T>
  static T run(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  static T run(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  static T run(T a, T b) {
    return a ^ b;
  }
};
struct Not {
  template <class T>
  static T run(T a) {
    return ~a;
  }
};

}  // namespace machine
