// SPDX-License-Identifier: Apache-2.0
// The pages for people who look at a server: / shows what it holds and does, /heads/NAME shows one head.
//
// A page is complete as the server sends it, so it can be read without scripts. In a browser, page/page.js
// draws the charts out of /history.json, and fetches the page again every two seconds to renew what has
// changed in it.
//
// Rendering takes no longer because of what happened before: tables have at most kMostRows rows.
//
// Thread-safe.
#ifndef LOSSD_SERVER_METRICS_STATUS_PAGE_H_
#define LOSSD_SERVER_METRICS_STATUS_PAGE_H_

#include <cstddef>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/engine.h"
#include "server/metrics/checkpoint_lists.h"
#include "server/metrics/history.h"
#include "server/metrics/metrics.h"

namespace lossd::metrics {

struct StatusPageOptions {
  std::string version;
  std::string grpc_address;
  absl::Time started;
  std::string collectives = {};            // that the devices of the server exchange by; empty: it has one
  CheckpointLists* checkpoints = nullptr;  // null: pages list none
};

class StatusPage {
 public:
  static constexpr size_t kMostRows = 100;
  static constexpr size_t kEventsShown = 12;  // the latest, on either page

  // All outlive the page.
  StatusPage(const StatusPageOptions& options, const engine::Engine* engine, const kernels::Backend* backend,
             Metrics* metrics, const History* history);

  // `trouble`: what keeps the server from work now, e.g. "draining"; "" if nothing does. Rates and latencies
  // are those of the last sample.
  std::string Render(absl::string_view trouble) const;
  // nullopt: there is no such head.
  std::optional<std::string> RenderHead(absl::string_view name) const;
  // What stands in its place.
  std::string RenderNoHead(absl::string_view name) const;

 private:
  std::string Summary(absl::string_view trouble) const;
  std::string HeadsTable() const;
  std::string MemoryTable() const;
  std::string LatencyTable() const;
  std::string EventsTable() const;

  const StatusPageOptions options_;
  const engine::Engine* const engine_;
  const kernels::Backend* const backend_;
  Metrics* const metrics_;
  const History* const history_;
};

// Rows of events, the newest first; of one head, if one is named. `most` of them.
std::string EventRows(const EventLog& events, absl::string_view head, size_t most);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_STATUS_PAGE_H_
