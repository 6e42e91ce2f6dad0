// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/mapped_rows.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "kernels/staging_adopter.h"
#include "server/connections/closer.h"
#include "server/ranks/row_regions.h"

namespace lossd::ranks {
namespace {

absl::Status Failed(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

absl::Status CheckListener(int socket) {
  const absl::StatusOr<wire::RegionPeer> leader = wire::PeerOf(socket);
  if (!leader.ok()) return leader.status();
  if (leader->user == geteuid()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the leader shares memory as user ", leader->user));
}

absl::Status AwaitWelcome(int socket) {
  pollfd ready = {.fd = socket, .events = POLLIN};
  if (poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(MappedRows::kWelcomeTimeout))) <= 0) {
    return absl::UnavailableError("the leader does not answer on its socket");
  }
  const absl::StatusOr<wire::RegionPacket> packet = wire::ReceiveRegionPacket(socket);
  if (!packet.ok()) return packet.status();
  v1::RowsFromLeader message;
  if (packet->closed || !message.ParseFromString(packet->bytes) || !message.welcome()) {
    return absl::UnavailableError("the leader shares no memory with this process");
  }
  return absl::OkStatus();
}

// That the memory cannot become shorter, which would end this process with a signal.
absl::Status CheckSealed(int descriptor, uint64_t bytes) {
  struct stat status = {};
  const int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || fstat(descriptor, &status) != 0) return Failed("the leader's memory");
  if ((seals & F_SEAL_SHRINK) == 0 || static_cast<uint64_t>(status.st_size) != bytes) {
    return absl::UnavailableError(absl::StrCat("the leader's memory has ", status.st_size,
                                               " bytes instead of ", bytes, ", or may become shorter"));
  }
  return absl::OkStatus();
}

}  // namespace

struct MappedRows::Region {
  Region(uint8_t* data, size_t size) : bytes(data, size) {}
  ~Region() {
    staging.reset();
    munmap(bytes.data(), bytes.size());
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const absl::Span<uint8_t> bytes;
  std::unique_ptr<kernels::StagingMemory> staging;  // the same memory, as the backend knows it
};

absl::StatusOr<std::unique_ptr<MappedRows>> MappedRows::Connect(const std::string& socket,
                                                                const std::string& token,
                                                                kernels::Backend* backend) {
  absl::StatusOr<wire::OwnedDescriptor> connected = wire::ConnectRegionSocket(socket);
  if (!connected.ok()) return connected.status();
  if (absl::Status status = CheckListener(connected->get()); !status.ok()) {
    connections::CloseElsewhere(*std::move(connected));  // a stranger may have sent something
    return status;
  }
  v1::RowsFromWorker hello;
  hello.set_token(token);
  absl::Status status = wire::SendRegionPacket(connected->get(), hello.SerializeAsString(), -1);
  if (status.ok()) status = AwaitWelcome(connected->get());
  if (!status.ok()) return status;
  return std::unique_ptr<MappedRows>(new MappedRows(*std::move(connected), backend));
}

MappedRows::MappedRows(wire::OwnedDescriptor socket, kernels::Backend* backend)
    : socket_(std::move(socket)),
      backend_(backend),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { Run(); }) {}

MappedRows::~MappedRows() {
  eventfd_write(stop_.get(), 1);
  thread_.join();
}

absl::StatusOr<MappedRows::Rows> MappedRows::Find(const v1::RowsPlace& place, uint64_t bytes) const {
  std::shared_ptr<Region> region;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = regions_.find(place.region());
    if (found != regions_.end()) region = found->second;
  }
  if (region == nullptr) {
    return absl::InternalError(
        absl::StrCat("the leader named memory ", place.region(), ", which there is not"));
  }
  const uint64_t size = region->bytes.size();
  if (place.offset() > size || bytes > size - place.offset()) {
    return absl::InternalError(
        absl::StrCat("the leader named ", bytes, " bytes at ", place.offset(), " of memory that has ", size));
  }
  uint8_t* const data = region->bytes.data() + place.offset();
  return Rows{.region = std::move(region), .data = data};
}

// ---- The thread ----

// When the connection ends, what is mapped stays: slices that name it may be under way.
void MappedRows::Run() {
  while (true) {
    pollfd ready[] = {{.fd = stop_.get(), .events = POLLIN}, {.fd = socket_.get(), .events = POLLIN}};
    if (poll(ready, 2, -1) < 0 && errno != EINTR) return;
    if (ready[0].revents != 0) return;
    if (ready[1].revents != 0 && !Read()) return;
  }
}

bool MappedRows::Read() {
  absl::StatusOr<wire::RegionPacket> packet = wire::ReceiveRegionPacket(socket_.get());
  v1::RowsFromLeader message;
  if (!packet.ok() || packet->closed || !message.ParseFromString(packet->bytes)) return false;
  if (message.bytes() == 0) {
    std::shared_ptr<Region> gone;  // unmapped without the lock
    absl::MutexLock lock(&mutex_);
    const auto found = regions_.find(message.region());
    if (found == regions_.end()) return true;
    gone = std::move(found->second);
    regions_.erase(found);
    return true;
  }
  const absl::Status mapped = Map(message.region(), message.bytes(), std::move(packet->descriptor));
  v1::RowsFromWorker answer;
  answer.set_region(message.region());
  if (!mapped.ok()) answer.set_refused(mapped.ToString().substr(0, wire::kMaxRegionPacket / 2));
  return wire::SendRegionPacket(socket_.get(), answer.SerializeAsString(), -1).ok();
}

// The descriptor is closed when this returns, so nothing of it is left when the leader has the answer.
absl::Status MappedRows::Map(uint64_t region, uint64_t bytes, wire::OwnedDescriptor descriptor) {
  if (!descriptor) return absl::UnavailableError("the leader's memory came without a descriptor");
  if (absl::Status status = CheckSealed(descriptor.get(), bytes); !status.ok()) return status;
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (data == MAP_FAILED) return Failed("mmap of the leader's memory");
  madvise(data, bytes, MADV_DONTFORK);
  const auto mapped = std::make_shared<Region>(static_cast<uint8_t*>(data), bytes);
  auto staging = kernels::AdoptStaging(backend_, mapped->bytes, {.counted = false});
  if (!staging.ok()) return staging.status();
  mapped->staging = *std::move(staging);
  absl::MutexLock lock(&mutex_);
  if (regions_.size() >= 2 * RowRegions::kMost) return absl::ResourceExhaustedError("too many regions");
  regions_[region] = mapped;
  return absl::OkStatus();
}

}  // namespace lossd::ranks
