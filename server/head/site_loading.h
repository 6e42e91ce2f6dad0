// SPDX-License-Identifier: Apache-2.0
// The part that other processes take in a load: who of them reads what its part of the head needs by itself.
//
// Thread-compatible.
#ifndef LOSSD_SERVER_HEAD_SITE_LOADING_H_
#define LOSSD_SERVER_HEAD_SITE_LOADING_H_

#include <memory>
#include <string>
#include <vector>

#include "server/head/file_sites.h"

namespace lossd::head {

class SiteLoading {
 public:
  // `config`: the head's.
  SiteLoading(const kernels::HeadConfig& config, std::vector<std::unique_ptr<LoadSite>> sites);

  // Lets go of the processes that do not see the checkpoint with this content.
  void Open(const std::string& checkpoint, const std::string& content_digest);
  // Of those that take part.
  std::vector<int> ranks() const;
  // Whether this process has to bring any of these rows to the head.
  bool Wants(const TensorPart& part) const;

  // Has the processes load. The head waits for that only.
  void Start();
  // Waits until all have ended; `status`, if that is an error: and they have no reason to go on. Returns the
  // first error.
  absl::Status Await(absl::Status status);

 private:
  kernels::HeadConfig config_;
  std::vector<std::unique_ptr<LoadSite>> sites_;
  std::vector<kernels::Replica> own_;  // the parts of the head that this process brings rows to
  bool started_ = false;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_SITE_LOADING_H_
