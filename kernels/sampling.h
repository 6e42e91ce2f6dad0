// The random numbers of sampled gradients and the rule that uses them (docs/math.md, "Sampled gradients").
// The same on every backend, to the bit. Also for device code.
//
// A number is a hash of the seed of the microbatch, the number of the row in it, and the class, so it does
// not depend on the chunk, the slice or the time in which the row is computed. Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_SAMPLING_H_
#define LOSSD_KERNELS_SAMPLING_H_

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define LOSSD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LOSSD_HOST_DEVICE inline
#endif

namespace lossd::kernels {

// What all numbers of a row start from.
struct SampleKey {
  uint32_t low = 0;
  uint32_t high = 0;
};

// A bijection of 64-bit numbers whose outputs for neighbouring inputs have nothing in common (the finalizer
// of splitmix64).
constexpr uint64_t MixBits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// seed: of the microbatch; row: its number in the microbatch.
constexpr SampleKey SampleKeyOf(uint64_t seed, uint64_t row) {
  const uint64_t mixed = MixBits(MixBits(seed) + (row + 1) * 0x9e3779b97f4a7c15u);
  return {static_cast<uint32_t>(mixed), static_cast<uint32_t>(mixed >> 32)};
}

// 32 bits for a row and a number below 2^32.
LOSSD_HOST_DEVICE uint32_t SampleBits(SampleKey key, uint32_t number) {
  uint32_t h = number * 0x9e3779b9u + key.low;
  h = (h ^ (h >> 16)) * 0x21f0aaadu;
  h = (h ^ (h >> 15) ^ key.high) * 0x735a2d97u;
  return h ^ (h >> 15);
}

// The upper 16 bits of the numbers of classes 2 pair and 2 pair + 1, the first in the lower half.
LOSSD_HOST_DEVICE uint32_t CoarseSamplePair(SampleKey key, uint32_t pair) { return SampleBits(key, pair); }

// The number of a class, in [0, 1], from its upper 16 bits.
LOSSD_HOST_DEVICE float FineSample(SampleKey key, uint32_t column, uint32_t coarse) {
  const uint32_t fine = SampleBits(key, ~column);  // no pair has this number: columns are below 2^31
  return fmaf(static_cast<float>(fine), 0x1p-32f, static_cast<float>(coarse)) * 0x1p-16f;
}

LOSSD_HOST_DEVICE float SampleOf(SampleKey key, uint32_t column) {
  const uint32_t pair = CoarseSamplePair(key, column >> 1);
  return FineSample(key, column, (column & 1) != 0 ? pair >> 16 : pair & 0xffffu);
}

// Whether a class below the threshold is taken. What is taken at a threshold is taken at every lower one.
LOSSD_HOST_DEVICE bool IsSampled(float size, float threshold, float sample) {
  return sample * threshold < size;
}

// What a class of this size (>= 0) counts instead: the size itself from the threshold on; below, the
// threshold with probability size / threshold, else nothing.
LOSSD_HOST_DEVICE float SampledSize(float size, float threshold, float sample) {
  if (size >= threshold) return size;
  return IsSampled(size, threshold, sample) ? threshold : 0.0f;
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_SAMPLING_H_
