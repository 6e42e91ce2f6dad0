// SPDX-License-Identifier: Apache-2.0
// The inner loops over one row of logits, compiled for several instruction sets and chosen once at run time.
//
// All loops are stateless and thread-safe, take any n >= 0 and unaligned pointers, and write nothing but
// their float* argument. Sums run over blocks in fp32 lanes and over blocks in double, so that a row of a
// million classes keeps the accuracy of a short one.
#ifndef LOSSD_KERNELS_CPU_ROW_LOOPS_H_
#define LOSSD_KERNELS_CPU_ROW_LOOPS_H_

#include <cstdint>
#include <vector>

namespace lossd::kernels {

// ds_v = p_v (slope - entropy_slope (log p_v + entropy)) - smoothing u_v, times 1 - (z_v / softcap)^2 with a
// softcap; p_v = exp(z_v - max) / total. The logit scale is already in the slopes.
struct LogitGradientTerms {
  float max = 0.0f;
  float inverse_total = 0.0f;
  float log_total = 0.0f;
  float slope = 0.0f;
  float entropy_slope = 0.0f;
  float entropy = 0.0f;
  float smoothing = 0.0f;
  float inverse_softcap = 0.0f;  // 0: none
};

struct RowLoops {
  const char* instruction_set;
  // z += scale * x.
  void (*add_scaled)(float* z, const float* x, float scale, int64_t n);
  bool (*all_finite)(const float* z, int64_t n);
  // z = cap * tanh(z / cap); false if a z was not finite.
  bool (*softcap)(float* z, float cap, int64_t n);
  // The largest element; -infinity if n = 0. NaN elements may be passed over.
  float (*max)(const float* z, int64_t n);
  // The first index of `value`, or -1.
  int64_t (*find)(const float* z, float value, int64_t n);
  // sum exp(z - max), for z <= max; not a number if an element is not. Terms below e^-87 count as 0.
  double (*exp_sum)(const float* z, float max, int64_t n);
  // The same, leaving exp(z - max) in z.
  double (*exp_sum_in_place)(float* z, float max, int64_t n);
  // sum exp(z - max) (z - max), to which a z of -infinity adds 0.
  double (*exp_moment)(const float* z, float max, int64_t n);
  // sum u (z - max); u null: all 1.
  double (*centred_sum)(const float* z, const float* u, float max, int64_t n);
  // e = 0 where e < threshold; the sum of what was there.
  double (*drop_exp)(float* e, float threshold, int64_t n);
  // The same for logits with exp(z - max) < threshold: they are moved down until their exponential is 0.
  double (*drop_logits)(float* z, float max, float threshold, int64_t n);
  // e = slope * e - smoothing * u; u null: all 1.
  void (*gradient_from_exp)(float* e, const float* u, float slope, float smoothing, int64_t n);
  // z = ds; u null: all 1.
  void (*gradient_from_logits)(float* z, const float* u, const LogitGradientTerms& terms, int64_t n);
};

// The loops for the widest instruction set that this processor has.
const RowLoops& SelectRowLoops();
// Every set of loops that this processor can run, for tests.
std::vector<const RowLoops*> AvailableRowLoops();

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ROW_LOOPS_H_
