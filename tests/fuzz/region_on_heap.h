// SPDX-License-Identifier: Apache-2.0
// A region of shared memory for one call, between the sanitizer's fences, and what the call may write of it.
#ifndef LOSSD_TESTS_FUZZ_REGION_ON_HEAP_H_
#define LOSSD_TESTS_FUZZ_REGION_ON_HEAP_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "lossd/v1/loss.pb.h"
#include "server/regions/regions.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {

// Thread-compatible.
class RegionOnHeap {
 public:
  static constexpr size_t kBytes = 4 << 10;

  // Full of `values`, again and again.
  explicit RegionOnHeap(const std::string& values) {
    auto memory = std::make_unique<Memory>();
    for (size_t i = 0; i < kBytes; ++i) memory->bytes_[i] = static_cast<uint8_t>(values[i % values.size()]);
    before_.assign(memory->bytes_.get(), memory->bytes_.get() + kBytes);
    region_ = std::make_shared<regions::Region>("region", std::move(memory));
  }

  const std::shared_ptr<regions::Region>& region() const { return region_; }
  // The call may write to this part, which is one of the region.
  void Allow(const v1::RegionRange& part) { writable_.push_back(part); }
  void CheckRest() const {
    const absl::Span<const uint8_t> bytes = region_->bytes();
    std::vector<uint8_t> rest(bytes.begin(), bytes.end());
    for (const v1::RegionRange& part : writable_)
      std::memcpy(&rest[part.offset()], &before_[part.offset()], part.bytes());
    FUZZ_CHECK(rest == before_, "a part of the region was written that the call had not named");
  }

 private:
  struct Memory final : regions::RegionMemory {
    struct Free {
      void operator()(uint8_t* bytes) const { operator delete (bytes, std::align_val_t{256}); }
    };
    absl::Span<uint8_t> bytes() const override { return {bytes_.get(), kBytes}; }
    int descriptor() const override { return -1; }
    const std::string& device() const override { return none_; }
    absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const override {
      std::memcpy(to, from.data(), from.size());
      return absl::OkStatus();
    }
    absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const override {
      std::memcpy(to.data(), from, to.size());
      return absl::OkStatus();
    }

    std::unique_ptr<uint8_t[], Free> bytes_{
        static_cast<uint8_t*>(operator new (kBytes, std::align_val_t{256}))};
    std::string none_;
  };

  std::shared_ptr<regions::Region> region_;
  std::vector<uint8_t> before_;
  std::vector<v1::RegionRange> writable_;
};

}  // namespace lossd::fuzz

#endif  // LOSSD_TESTS_FUZZ_REGION_ON_HEAP_H_
