#include "client/cli/http_fetch.h"

#include <httplib.h>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {

absl::StatusOr<std::string> HttpFetch(const std::string& address, const std::string& path,
                                      absl::Duration timeout) {
  httplib::Client client(absl::StrCat("http://", address));
  if (!client.is_valid()) {
    return errors::WithViolation(
        absl::InvalidArgumentError(absl::StrCat("\"", address, "\" is not HOST:PORT")),
        {std::string(kHttpField), "must be HOST:PORT", address});
  }
  client.set_connection_timeout(absl::ToChronoMilliseconds(timeout));
  client.set_read_timeout(absl::ToChronoMilliseconds(timeout));
  const httplib::Result result = client.Get(path);
  if (!result) {
    return errors::WithViolation(
        absl::UnavailableError(absl::StrCat("nothing answers at http://", address, path, " (",
                                            httplib::to_string(result.error()),
                                            "); name the address with --http")),
        {std::string(kHttpField), "must be the address where a server answers HTTP", address});
  }
  if (result->status != 200) {
    return absl::InternalError(
        absl::StrCat("http://", address, path, " answered with status ", result->status));
  }
  return result->body;
}

}  // namespace lossd::cli
