// SPDX-License-Identifier: Apache-2.0
// What was chosen where there was a choice, for people: printed and logged, and no code depends on the words.
#ifndef LOSSD_KERNELS_CHOICE_H_
#define LOSSD_KERNELS_CHOICE_H_

#include <cstdint>
#include <string>

namespace lossd::kernels {

struct Choice {
  std::string what;             // e.g. "loss"
  std::string choice;           // e.g. "after the logits product"
  std::string reason;           // e.g. "few rows"; empty: there is nothing to say
  int64_t workspace_bytes = 0;  // of the head's workspace, that go with it; 0: none of its own

  friend bool operator==(const Choice&, const Choice&) = default;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CHOICE_H_
