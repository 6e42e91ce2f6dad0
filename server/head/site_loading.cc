// SPDX-License-Identifier: Apache-2.0
#include "server/head/site_loading.h"

#include <algorithm>
#include <utility>

#include "kernels/clocks/clock.h"

namespace lossd::head {

SiteLoading::SiteLoading(const kernels::HeadConfig& config, std::vector<std::unique_ptr<LoadSite>> sites)
    : config_(config), sites_(std::move(sites)) {
  if (!sites_.empty()) config_.split = sites_.front()->part().split;
}

void SiteLoading::Open(const std::string& checkpoint, const std::string& content_digest) {
  for (const auto& site : sites_) site->StartOpening(checkpoint, content_digest);
  const absl::Time deadline = clocks::SteadyNow() + kProofTimeout;
  const int count = sites_.empty() ? 1 : sites_.front()->part().replica.count;
  for (int index = 0; index < count; ++index) own_.push_back({index, count});
  std::vector<std::unique_ptr<LoadSite>> seeing;
  for (std::unique_ptr<LoadSite>& site : sites_) {
    const absl::Status opened = site->AwaitOpened(deadline);
    site->NoteOpened(opened);
    if (!opened.ok()) continue;
    const int index = site->part().replica.index;
    own_.erase(std::remove_if(own_.begin(), own_.end(),
                              [index](const kernels::Replica& own) { return own.index == index; }),
               own_.end());
    seeing.push_back(std::move(site));
  }
  sites_ = std::move(seeing);
}

std::vector<int> SiteLoading::ranks() const {
  std::vector<int> ranks;
  for (const auto& site : sites_) ranks.push_back(site->rank());
  return ranks;
}

bool SiteLoading::Wants(const TensorPart& part) const {
  return std::any_of(own_.begin(), own_.end(),
                     [&](const kernels::Replica& own) { return RowsOfReplica(config_, part, own).rows > 0; });
}

void SiteLoading::Start() {
  started_ = true;
  for (const auto& site : sites_) site->StartLoading();
}

absl::Status SiteLoading::Await(absl::Status status) {
  for (const auto& site : sites_) {
    if (!status.ok() || !started_) site->Cancel();
    const absl::Status ended = site->Await();
    if (started_) status.Update(ended);
  }
  return status;
}

}  // namespace lossd::head
