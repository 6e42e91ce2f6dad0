// SPDX-License-Identifier: Apache-2.0
// How the logits of a row come to a wanted softmax although a hidden state has far fewer dimensions than
// there are classes: a few candidates get the logits that they need, and all other classes share one normal
// distribution, which random weight rows give by themselves.
#ifndef LOSSD_KERNELS_DATA_LOGIT_MODEL_H_
#define LOSSD_KERNELS_DATA_LOGIT_MODEL_H_

#include <cstdint>
#include <vector>

namespace lossd::data {

// In nats, up to a constant that the softmax does not see.
struct LogitModel {
  // Of the normal part of the logit of a class that is not a candidate; its mean is the class's own logit.
  double deviation = 0.0;
  // Of the candidates, the largest first.
  std::vector<double> candidates;
  // log p of a class with logit z is z + shift.
  double shift = 0.0;
};

// The classes' own logits, as far as the fit needs them: values with the number of classes that each stands
// for.
struct ClassLogits {
  std::vector<double> values;
  std::vector<double> counts;
};

// Fits a row with the probabilities exp(log_p[rank - 1]) for hidden states of `hidden_size` dimensions. The
// candidates are as many as a hidden state of that size has room for, fewer than hidden_size / 4.
LogitModel FitLogits(const std::vector<double>& log_p, const ClassLogits& classes, int64_t hidden_size);

}  // namespace lossd::data

#endif  // LOSSD_KERNELS_DATA_LOGIT_MODEL_H_
