// SPDX-License-Identifier: Apache-2.0
#include "server/app/local_ranks.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/waits.h"
#include "server/app/gpu_watch.h"
#include "server/app/rank_families.h"
#include "server/app/rank_parts.h"
#include "server/log/log.h"

namespace lossd::app {
namespace {

// For ranks to end at the end of the process.
constexpr absl::Duration kPatience = absl::Seconds(20);

}  // namespace

std::string RankNames(int first, int count) {
  std::string names = absl::StrCat(count == 1 ? "rank " : "ranks ", first);
  for (int i = 1; i < count; ++i) absl::StrAppend(&names, ", ", first + i);
  return names;
}

struct LocalRanks::Rank {
  explicit Rank(int number)
      : rank(number), watch([this](const absl::Status& status) { worker->ReportLoss(status); }) {}

  ranks::v1::Metrics Metrics() {
    const kernels::RankTimes times = worker->times();
    absl::MutexLock lock(&mutex);
    return ToProto(metrics::WorkerFamilies(times, gpus));
  }
  // Monitors call into the worker, and it asks them.
  void StopMonitors() {
    std::vector<std::unique_ptr<metrics::GpuMonitor>> stopped;
    absl::MutexLock lock(&mutex);
    stopped.swap(gpus);
  }

  // Whether it is, after a while.
  bool AwaitClosed() {
    absl::MutexLock lock(&mutex);
    return clocks::AwaitFor(mutex, absl::Condition(&closed), kPatience);
  }

  const int rank;
  std::unique_ptr<ranks::Worker> worker;  // const once it is there
  DeviceWatch watch;
  absl::Mutex mutex;
  std::vector<std::unique_ptr<metrics::GpuMonitor>> gpus ABSL_GUARDED_BY(mutex);
  bool closed ABSL_GUARDED_BY(mutex) = false;  // the last that the thread does
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<LocalRanks>> LocalRanks::Start(const ServerOptions& options,
                                                              std::vector<kernels::CreatedBackend> backends,
                                                              LocalRanksOptions local) {
  std::unique_ptr<LocalRanks> ranks(new LocalRanks(options, std::move(local)));
  for (kernels::CreatedBackend& backend : backends) {
    if (absl::Status status = ranks->Add(std::move(backend)); !status.ok()) return status;
  }
  for (const auto& rank : ranks->ranks_) {
    rank->thread = std::thread([all = ranks.get(), one = rank.get()] { all->Run(one); });
  }
  return ranks;
}

LocalRanks::LocalRanks(const ServerOptions& options, LocalRanksOptions local)
    : options_(options), local_(std::move(local)) {}

absl::Status LocalRanks::Add(kernels::CreatedBackend own) {
  const kernels::BackendInfo info = own.backend->info();
  auto rank = std::make_unique<Rank>(local_.first_rank + static_cast<int>(ranks_.size()));
  absl::StatusOr<std::unique_ptr<ranks::Worker>> worker =
      CreateWorker(options_,
                   {.rank = rank->rank,
                    .devices = local_.devices,
                    .local_address = local_.local_address,
                    .on_joined = [this] { OnJoined(); },
                    .metrics = [one = rank.get()] { return one->Metrics(); }},
                   std::move(own));
  if (!worker.ok()) return worker.status();
  rank->worker = *std::move(worker);
  {
    absl::MutexLock lock(&rank->mutex);
    rank->gpus = WatchGpus(info, {&rank->watch});
  }
  log::Log(log::LogLevel::kInfo, "worker",
           {{"version", options_.version},
            {"rank", rank->rank},
            {"ranks", options_.ranks.launch.ranks * local_.devices},
            {"leader", options_.ranks.launch.leader},
            {"backend", info.name},
            {"device", info.device}});
  ranks_.push_back(std::move(rank));
  return absl::OkStatus();
}

LocalRanks::~LocalRanks() {
  for (const auto& rank : ranks_) {
    if (rank->thread.joinable()) rank->worker->Leave("the process ends");
  }
  for (auto& rank : ranks_) {
    if (!rank->thread.joinable()) continue;
    if (rank->AwaitClosed()) {
      rank->thread.join();
    } else {
      rank->thread.detach();
      (void)rank.release();
    }
  }
}

// The stream is closed here, and not with the object: the leader's end waits for it. A rank that is lost
// tells so first, for it may hang.
void LocalRanks::Run(Rank* rank) {
  const absl::Status status = rank->worker->Run();
  const RanksEnd end = {status, rank->worker->joined()};
  const bool lost = !status.ok() && end.joined;
  if (lost) OnEnd(end);
  rank->StopMonitors();
  rank->worker->Close();
  if (!lost) OnEnd(end);
  absl::MutexLock lock(&rank->mutex);
  rank->closed = true;
}

void LocalRanks::OnJoined() {
  {
    absl::MutexLock lock(&mutex_);
    if (++joined_ != ranks_.size()) return;
  }
  local_.on_joined();
}

void LocalRanks::OnEnd(const RanksEnd& end) {
  {
    absl::MutexLock lock(&mutex_);
    ++ended_;
    if (end_told_ || (end.status.ok() && ended_ != ranks_.size())) return;
    end_told_ = true;
  }
  local_.on_end(end);
}

void LocalRanks::Leave(const std::string& reason) {
  for (const auto& rank : ranks_) rank->worker->Leave(absl::StrCat("rank ", rank->rank, " got ", reason));
}

bool LocalRanks::joined() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->worker->joined(); });
}

bool LocalRanks::device_lost() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->watch.lost(); });
}

absl::Duration LocalRanks::Silence() const {
  absl::Duration longest = absl::ZeroDuration();
  for (const auto& rank : ranks_) longest = std::max(longest, rank->worker->Silence());
  return longest;
}

}  // namespace lossd::app
