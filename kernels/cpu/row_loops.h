// SPDX-License-Identifier: Apache-2.0
// The inner loops over one row of logits (RowLoops). They are compiled for several instruction sets;
// SelectRowLoops chooses one set at run time.
//
// All loops are stateless and thread-safe, take any n >= 0 and unaligned pointers, and write nothing but
// their float* argument. Sums are in fp32 within a block and in double over the blocks, so that a row of a
// million classes is as accurate as a short one.
#ifndef LOSSD_KERNELS_CPU_ROW_LOOPS_H_
#define LOSSD_KERNELS_CPU_ROW_LOOPS_H_

#include <cstdint>
#include <vector>

namespace lossd::kernels {

// The terms of the gradient with respect to the dot product s_v:
//   ds_v = (p_v (slope - entropy_slope (log p_v + entropy)) - smoothing u_v) (1 - (z_v / softcap)^2)
// with p_v = exp(z_v - max) / total. Without a softcap the last factor is 1. The slopes include the logit
// scale.
struct LogitGradientTerms {
  float max = 0.0f;
  float inverse_total = 0.0f;
  float log_total = 0.0f;
  float slope = 0.0f;
  float entropy_slope = 0.0f;
  float entropy = 0.0f;
  float smoothing = 0.0f;
  float inverse_softcap = 0.0f;  // 0: no softcap
};

struct RowLoops {
  const char* instruction_set;
  // z += scale * x.
  void (*add_scaled)(float* z, const float* x, float scale, int64_t n);
  bool (*all_finite)(const float* z, int64_t n);
  // z = cap * tanh(z / cap); false if a z was not finite.
  bool (*softcap)(float* z, float cap, int64_t n);
  // The largest element; -infinity if n = 0. NaN elements may be skipped.
  float (*max)(const float* z, int64_t n);
  // The first index of `value`, or -1.
  int64_t (*find)(const float* z, float value, int64_t n);
  // sum exp(z - max), for z <= max. NaN if an element is NaN. Terms below e^-87 count as 0.
  double (*exp_sum)(const float* z, float max, int64_t n);
  // The same, but replaces z by exp(z - max).
  double (*exp_sum_in_place)(float* z, float max, int64_t n);
  // sum exp(z - max) (z - max). An element of -infinity adds 0.
  double (*exp_moment)(const float* z, float max, int64_t n);
  // sum u (z - max). If u is null, all u are 1.
  double (*centred_sum)(const float* z, const float* u, float max, int64_t n);
  // Sets elements e < threshold to 0, and returns the sum of their former values.
  double (*drop_exp)(float* e, float threshold, int64_t n);
  // The same for logits with exp(z - max) < threshold: it makes the logits so small that their exponential is
  // 0, and returns the sum of their exponentials.
  double (*drop_logits)(float* z, float max, float threshold, int64_t n);
  // e = slope * e - smoothing * u. If u is null, all u are 1.
  void (*gradient_from_exp)(float* e, const float* u, float slope, float smoothing, int64_t n);
  // z = ds. If u is null, all u are 1.
  void (*gradient_from_logits)(float* z, const float* u, const LogitGradientTerms& terms, int64_t n);
};

// The loops for the widest instruction set of this processor.
const RowLoops& SelectRowLoops();
// Every set of loops that this processor can run, for tests.
std::vector<const RowLoops*> AvailableRowLoops();

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ROW_LOOPS_H_
