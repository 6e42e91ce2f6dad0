#include "server/app/health.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::app {
namespace {

metrics::HttpResponse Unavailable(std::string why) { return {.status = 503, .body = std::move(why)}; }

}  // namespace

metrics::HttpResponse Liveness(const Health& health, absl::Duration timeout) {
  if (health.device_lost) return Unavailable("device lost\n");
  if (health.device_silence > timeout) {
    return Unavailable(
        absl::StrCat("no progress on the device for ",
                     absl::FormatDuration(absl::Trunc(health.device_silence, absl::Seconds(1))), "\n"));
  }
  return {.body = "ok\n"};
}

metrics::HttpResponse Readiness(const Health& health) {
  if (health.device_lost) return Unavailable("device lost\n");
  if (health.draining) return Unavailable("draining\n");
  return {.body = "ok\n"};
}

}  // namespace lossd::app
