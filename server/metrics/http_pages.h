// What HTTP answers beside metrics and health: the pages, their script and style, and the samples and events
// as JSON.
//
//   /              the status page
//   /heads/NAME    the page of a head
//   /history.json  samples; ?after=NUMBER: only later ones; ?head=NAME: of the heads only this one
//   /events.json   events; ?after=ID: only later ones
//   /page/...      script, style and icon of the pages
//
// A parameter that is malformed, or none of the path's, is answered with 400.
#ifndef LOSSD_SERVER_METRICS_HTTP_PAGES_H_
#define LOSSD_SERVER_METRICS_HTTP_PAGES_H_

#include <cstdint>
#include <functional>

#include "server/metrics/event_log.h"
#include "server/metrics/history.h"
#include "server/metrics/http_router.h"
#include "server/metrics/metrics.h"
#include "server/metrics/sampler.h"
#include "server/metrics/status_page.h"

namespace lossd::metrics {

// All outlive the handlers.
struct PageSources {
  const StatusPage* page = nullptr;
  const History* history = nullptr;
  const EventLog* events = nullptr;
  uint64_t incarnation = 0;
  std::function<bool()> draining;
};
void AddPages(const PageSources& sources, HttpHandlers* handlers);

// The pages of a server, and the samples that they show: from its creation on, samples are taken.
//
// Thread-safe.
class HttpPages {
 public:
  // All outlive this. `draining` is asked with each request.
  HttpPages(const StatusPageOptions& options, const engine::Engine* engine, const kernels::Backend* backend,
            Metrics* metrics, std::function<bool()> draining);

  // This outlives the handlers.
  void AddTo(HttpHandlers* handlers) const { AddPages(sources_, handlers); }

 private:
  History history_;
  Sampler sampler_;
  const StatusPage page_;
  const PageSources sources_;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HTTP_PAGES_H_
