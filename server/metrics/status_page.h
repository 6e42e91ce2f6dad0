// The page at /: what the server holds and does, for a person who looks at it now and then. One HTML
// document without scripts or external parts, which reloads itself.
//
// Thread-safe.
#ifndef LOSSD_SERVER_METRICS_STATUS_PAGE_H_
#define LOSSD_SERVER_METRICS_STATUS_PAGE_H_

#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"

namespace lossd::metrics {

struct StatusPageOptions {
  std::string version;
  std::string grpc_address;
  absl::Time started;
};

class StatusPage {
 public:
  // All three outlive the page.
  StatusPage(const StatusPageOptions& options, const engine::Engine* engine, const kernels::Backend* backend,
             const Metrics* metrics);

  // `draining` as of now. Rates are averages since the last view (by anyone).
  std::string Render(bool draining) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Rates {
    double seconds = 0.0;  // since the last view; 0: first view
    double rows = 0.0;     // per second
    double bytes_in = 0.0;
    double bytes_out = 0.0;
  };
  Rates UpdateRates() ABSL_LOCKS_EXCLUDED(mutex_);

  std::string Summary(bool draining, const engine::EngineStats& stats);
  std::string HeadsTable() const;
  std::string MemoryTable() const;
  std::string LatencyTable() const;

  const StatusPageOptions options_;
  const engine::Engine* const engine_;
  const kernels::Backend* const backend_;
  const Metrics* const metrics_;

  absl::Mutex mutex_;
  std::optional<absl::Time> last_view_ ABSL_GUARDED_BY(mutex_);
  Totals last_totals_ ABSL_GUARDED_BY(mutex_);
};

// Text safe between tags and inside quoted attributes.
std::string EscapeHtml(absl::string_view text);
// "0 B", "512 B", "1.5 KiB", "3.2 GiB".
std::string FormatBytes(double bytes);
// "0", "35 us", "1.2 ms", "3.4 s".
std::string FormatSeconds(double seconds);

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_STATUS_PAGE_H_
