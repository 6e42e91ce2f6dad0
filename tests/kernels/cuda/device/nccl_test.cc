// SPDX-License-Identifier: Apache-2.0
// What becomes of an exchange that fails or hangs. NCCL is played by functions here, which the linker gives
// to dlopen and dlsym while these tests run; the streams are real.
#include <cuda_runtime.h>
#include <nccl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/gloo_link.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device/collectives.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/cuda/device/thread_device.h"

namespace lossd::kernels::cuda::nccl_test {
namespace {

using testing::device_of_thread;

bool playing = false;  // else the other tests of this program have the real functions

// What the functions below do, and what was called.
struct Played {
  bool missing = false;              // no library at all
  std::string lacks;                 // the function that the library does not have
  std::string fails;                 // the function that fails
  ncclResult_t later = ncclSuccess;  // what communicators report by themselves
  std::vector<std::string> calls;
  std::string multicast;  // NCCL_NVLS_ENABLE when the library was loaded
  int aborted = 0, destroyed = 0;
  int grouped = 0;           // calls of ncclGroupStart without their end
  int ended_in_a_group = 0;  // of aborted and destroyed communicators
  int unloaded = 0;
  std::vector<const void*> from, to;  // of ncclAllGather and ncclReduceScatter
  std::vector<int> ended_on;          // the device of the thread that ended the first communicator
};
Played played;
std::atomic<bool> hangs{false};  // ncclCommInitRank does

ncclResult_t Play(const char* name) {
  played.calls.emplace_back(name);
  return played.fails == name ? ncclSystemError : ncclSuccess;
}

ncclComm_t Communicator(int i) { return reinterpret_cast<ncclComm_t>(static_cast<uintptr_t>(i + 1)); }

ncclResult_t GetVersion(int* version) {
  *version = 22803;
  return Play("ncclGetVersion");
}
ncclResult_t InitAll(ncclComm_t* communicators, int count, const int*) {
  for (int i = 0; i < count; ++i) communicators[i] = Communicator(i);
  return Play("ncclCommInitAll");
}
ncclResult_t UniqueId(ncclUniqueId* id) {
  std::fill(std::begin(id->internal), std::end(id->internal), 'u');
  return Play("ncclGetUniqueId");
}
ncclResult_t InitRank(ncclComm_t* communicator, int, ncclUniqueId, int rank) {
  while (hangs) usleep(1000);
  *communicator = Communicator(rank);
  return Play("ncclCommInitRank");
}
// As NCCL below 2.27.6 it leaves the device of what it has freed behind.
ncclResult_t EndOne(int* ended) {
  ++*ended;
  played.ended_in_a_group += played.grouped;
  if (*ended == 1) played.ended_on.push_back(device_of_thread);
  device_of_thread = 7;
  return ncclSuccess;
}
ncclResult_t Destroy(ncclComm_t) { return EndOne(&played.destroyed); }
ncclResult_t Abort(ncclComm_t) { return EndOne(&played.aborted); }
ncclResult_t AsyncError(ncclComm_t, ncclResult_t* result) {
  *result = played.later;
  return Play("ncclCommGetAsyncError");
}
const char* ErrorString(ncclResult_t) { return "unhandled system error"; }
ncclResult_t GroupStart() {
  const ncclResult_t result = Play("ncclGroupStart");
  played.grouped += result == ncclSuccess ? 1 : 0;
  return result;
}
ncclResult_t GroupEnd() { return --played.grouped, Play("ncclGroupEnd"); }
ncclResult_t Reduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, ncclComm_t, cudaStream_t) {
  return Play("ncclReduce");
}
ncclResult_t Broadcast(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return Play("ncclBroadcast");
}

ncclResult_t AllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) {
  return Play("ncclAllReduce");
}
ncclResult_t AllGather(const void* from, void* to, size_t, ncclDataType_t, ncclComm_t, cudaStream_t) {
  played.from.push_back(from);
  played.to.push_back(to);
  return Play("ncclAllGather");
}
ncclResult_t ReduceScatter(const void* from, void* to, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                           cudaStream_t) {
  played.from.push_back(from);
  played.to.push_back(to);
  return Play("ncclReduceScatter");
}

struct Function {
  const char* name;
  void* function;
};
const Function kFunctions[] = {
    {"ncclGetVersion", reinterpret_cast<void*>(&GetVersion)},
    {"ncclCommInitAll", reinterpret_cast<void*>(&InitAll)},
    {"ncclGetUniqueId", reinterpret_cast<void*>(&UniqueId)},
    {"ncclCommInitRank", reinterpret_cast<void*>(&InitRank)},
    {"ncclCommDestroy", reinterpret_cast<void*>(&Destroy)},
    {"ncclCommAbort", reinterpret_cast<void*>(&Abort)},
    {"ncclCommGetAsyncError", reinterpret_cast<void*>(&AsyncError)},
    {"ncclGetErrorString", reinterpret_cast<void*>(&ErrorString)},
    {"ncclGroupStart", reinterpret_cast<void*>(&GroupStart)},
    {"ncclGroupEnd", reinterpret_cast<void*>(&GroupEnd)},
    {"ncclReduce", reinterpret_cast<void*>(&Reduce)},
    {"ncclBroadcast", reinterpret_cast<void*>(&Broadcast)},
    {"ncclAllReduce", reinterpret_cast<void*>(&AllReduce)},
    {"ncclAllGather", reinterpret_cast<void*>(&AllGather)},
    {"ncclReduceScatter", reinterpret_cast<void*>(&ReduceScatter)},
};

char library;  // what dlopen gives

// NOLINTBEGIN(bugprone-reserved-identifier): the linker makes these names.
extern "C" {

void* __real_dlopen(const char* name, int flags);
void* __wrap_dlopen(const char* name, int flags) {
  if (!playing || name == nullptr || std::string(name).find("nccl") == std::string::npos)
    return __real_dlopen(name, flags);
  const char* const multicast = std::getenv("NCCL_NVLS_ENABLE");
  played.multicast = multicast == nullptr ? "unset" : multicast;
  return played.missing ? __real_dlopen("libplayed-missing.so", flags) : &library;
}

void* __real_dlsym(void* file, const char* name);
void* __wrap_dlsym(void* file, const char* name) {
  if (file != &library) return __real_dlsym(file, name);
  for (const Function& each : kFunctions) {
    if (played.lacks != name && std::string(each.name) == name) return each.function;
  }
  return __real_dlsym(nullptr, name);  // sets dlerror
}

int __real_dlclose(void* file);
int __wrap_dlclose(void* file) { return file == &library ? (++played.unloaded, 0) : __real_dlclose(file); }

// Of the thread that ends communicators, also where there is no GPU.
cudaError_t __real_cudaGetDevice(int* device);
cudaError_t __wrap_cudaGetDevice(int* device) {
  if (!playing) return __real_cudaGetDevice(device);
  *device = device_of_thread;
  return cudaSuccess;
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class NcclTest : public ::testing::Test {
 protected:
  NcclTest() {
    played = Played();
    playing = true;
  }
  ~NcclTest() override { playing = false; }
  absl::StatusOr<std::unique_ptr<Nccl>> Connect() { return Nccl::Connect({0, 0}); }
};

TEST_F(NcclTest, SaysWhatIsMissing) {
  played.missing = true;
  EXPECT_THAT(Connect().status().message(), HasSubstr("libnccl2"));
  EXPECT_THAT(Connect().status().message(), HasSubstr("libplayed-missing.so"));
  played = Played();
  played.lacks = "ncclReduce";
  EXPECT_EQ(Connect().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Connect().status().message(), HasSubstr("NCCL lacks"));
}

// NCCL reads its settings when it is loaded.
TEST_F(NcclTest, NvlinkMulticastIsOffUnlessTheEnvironmentSaysOtherwise) {
  unsetenv("NCCL_NVLS_ENABLE");
  EXPECT_TRUE(Nccl::CheckLoads().ok());
  EXPECT_EQ(played.multicast, "0");
  setenv("NCCL_NVLS_ENABLE", "1", 1);
  EXPECT_TRUE(Nccl::CheckLoads().ok());
  EXPECT_EQ(played.multicast, "1");
  unsetenv("NCCL_NVLS_ENABLE");
}

TEST_F(NcclTest, SaysThatTheGpusCannotBeConnected) {
  played.fails = "ncclCommInitAll";
  EXPECT_EQ(Connect().status(), absl::UnavailableError("ncclCommInitAll failed: unhandled system error"));
}

TEST_F(NcclTest, AnIdIsWhatAProcessNeedsToJoin) {
  const auto id = Nccl::NewId();
  ASSERT_TRUE(id.ok()) << id.status();
  EXPECT_EQ(*id, std::string(NCCL_UNIQUE_ID_BYTES, 'u'));
  EXPECT_EQ(Nccl::Join(0, {1, 2}, "short", absl::Seconds(1)).status().code(), absl::StatusCode::kInternal);
  played.fails = "ncclGetUniqueId";
  EXPECT_EQ(Nccl::NewId().status(), absl::UnavailableError("ncclGetUniqueId failed: unhandled system error"));
}

TEST_F(NcclTest, AProcessJoinsWithItsOwnGpu) {
  LOSSD_SKIP_WITHOUT_GPU();
  const std::string id(NCCL_UNIQUE_ID_BYTES, 'u');
  {
    const auto nccl = Nccl::Join(0, {1, 3}, id, absl::Minutes(1));
    ASSERT_TRUE(nccl.ok()) << nccl.status();
    EXPECT_EQ((*nccl)->members(), 3);
    EXPECT_EQ((*nccl)->first_member(), 1);
    for (const char* const kind :
         {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclReduce", "ncclBroadcast"}) {
      EXPECT_THAT(played.calls, Contains(kind)) << "the links of it are not there";
    }
  }
  EXPECT_EQ(played.destroyed, 1);
  played.fails = "ncclCommInitRank";
  EXPECT_EQ(Nccl::Join(0, {1, 3}, id, absl::Minutes(1)).status(),
            absl::UnavailableError("ncclCommInitRank failed: unhandled system error"));
  hangs = true;
  const absl::Status late = Nccl::Join(0, {1, 3}, id, absl::Milliseconds(20)).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(late.message(), HasSubstr("has not connected rank 1 of 3 within 20ms"));
  hangs = false;
}

TEST_F(NcclTest, DestroysItsCommunicators) {
  { ASSERT_TRUE(Connect().ok()); }
  EXPECT_EQ(played.destroyed, 2);
  EXPECT_EQ(played.aborted, 0);
}

// Nothing of a communicator may be freed before the others, which use its memory, know that they end.
TEST_F(NcclTest, CommunicatorsOfAProcessEndAsOneGroup) {
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails ? "aborted" : "destroyed");
    played = Played();
    device_of_thread = 3;
    {
      const auto nccl = Connect();
      ASSERT_TRUE(nccl.ok()) << nccl.status();
      if (fails) (*nccl)->Abort(absl::UnavailableError("a GPU is lost")).IgnoreError();
    }
    EXPECT_EQ(played.aborted, fails ? 2 : 0);
    EXPECT_EQ(played.destroyed, fails ? 0 : 2) << "what was aborted is freed";
    EXPECT_EQ(played.ended_in_a_group, 2);
    EXPECT_EQ(played.grouped, 0) << "a group stays open";
    EXPECT_EQ(device_of_thread, 3) << "of the thread that ends them";
  }
}

// A thread that has never chosen a GPU, as that of a watch, makes no context on GPU 0.
TEST_F(NcclTest, CommunicatorsAreAbortedOnAThreadOfTheirGpu) {
  const auto nccl = Nccl::Connect({4}, absl::Minutes(1));
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  std::thread([&] { (*nccl)->Abort(absl::UnavailableError("a GPU is lost")).IgnoreError(); }).join();
  EXPECT_THAT(played.ended_on, ElementsAre(4));
}

// Threads of NCCL outlive its communicators.
TEST_F(NcclTest, TheLibraryStays) {
  EXPECT_TRUE(Connect().ok());
  EXPECT_TRUE(Nccl::CheckLoads().ok());
  EXPECT_TRUE(Nccl::Version().ok());
  EXPECT_TRUE(Nccl::NewId().ok());
  EXPECT_EQ(played.unloaded, 0);
}

// Whatever call fails, its name is said, the communicators are aborted, and every later exchange fails alike.
TEST_F(NcclTest, AnExchangeThatFailsIsTheLast) {
  for (const char* const victim : {"ncclGroupStart", "ncclReduce", "ncclBroadcast", "ncclGroupEnd"}) {
    SCOPED_TRACE(victim);
    played = Played();
    const auto nccl = Connect();
    ASSERT_TRUE(nccl.ok()) << nccl.status();
    const std::vector<Nccl::Part> parts = {{0}, {1}};
    const auto exchange = [&]() -> absl::Status {
      if (absl::Status status = (*nccl)->Sum(parts, 4, 0); !status.ok()) return status;
      return (*nccl)->Spread(parts, DType::kBFloat16, 4, 1);
    };
    ASSERT_TRUE((*nccl)->Enqueue(exchange).ok());
    played.fails = victim;
    const absl::Status failed = (*nccl)->Enqueue(exchange);
    EXPECT_EQ(failed.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(failed.message(), HasSubstr(victim));
    EXPECT_EQ(played.aborted, 2);
    played.fails.clear();
    played.calls.clear();
    EXPECT_EQ((*nccl)->Enqueue(exchange), failed);
    EXPECT_THAT(played.calls, ::testing::IsEmpty());
  }
  EXPECT_EQ(played.destroyed, 0);
}

// In place: every member's own place among those of all.
TEST_F(NcclTest, ShardsLieInTheOrderOfTheMembers) {
  const auto nccl = Connect();
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  float one[8] = {}, other[8] = {};
  const std::vector<Nccl::Part> parts = {{0, one}, {1, other}};
  ASSERT_TRUE((*nccl)->Enqueue([&] { return (*nccl)->SumShards(parts, 4); }).ok());
  EXPECT_THAT(played.from, ElementsAre(one, other));
  EXPECT_THAT(played.to, ElementsAre(one, other + 4));
  played.from.clear();
  played.to.clear();
  ASSERT_TRUE((*nccl)->Enqueue([&] { return (*nccl)->SpreadShards(parts, DType::kBFloat16, 8); }).ok());
  EXPECT_THAT(played.from, ElementsAre(one, other + 4));
  EXPECT_THAT(played.to, ElementsAre(one, other));
}

// As one that waits inside the driver for a GPU, which waits for another.
TEST_F(NcclTest, AThreadThatDoesNotComeBackIsFreed) {
  const auto nccl = Nccl::Connect({0, 0}, absl::Milliseconds(100));
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  EXPECT_TRUE((*nccl)->Watched([] { return absl::OkStatus(); }).ok());
  const absl::Status status = (*nccl)->Watched([&] {
    while ((*nccl)->failure().ok()) absl::SleepFor(absl::Milliseconds(1));
    return (*nccl)->failure();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("has not ended within 100ms"));
  EXPECT_EQ((*nccl)->Abort(absl::UnavailableError("another")), status) << "and waits until all are aborted";
  EXPECT_EQ(played.aborted, 2);
}

// Where another rank is lost, whoever notices it aborts, and streams end as if all had been done.
TEST_F(NcclTest, NothingSucceedsAfterAnAbortFromElsewhere) {
  const auto nccl = Connect();
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  EXPECT_TRUE((*nccl)->Wait(std::vector<Nccl::Part>()).ok());
  const absl::Status reason = absl::UnavailableError("rank 1 is lost");
  EXPECT_EQ((*nccl)->Abort(reason), reason);
  EXPECT_EQ((*nccl)->Wait(std::vector<Nccl::Part>()), reason);
  EXPECT_EQ((*nccl)->Abort(absl::UnavailableError("another")), reason);
  EXPECT_EQ(played.aborted, 2);
}

// ---- What a link offers ----

class CudaLinkTest : public NcclTest {
 protected:
  // `gloo`: whether there is Gloo.
  static absl::StatusOr<std::unique_ptr<RankLink>> Create(const std::string& collectives, bool gloo) {
    return CreateCudaLink({.replica = {1, 2},
                           .collectives = collectives,
                           .make_transfers = [gloo]() -> absl::StatusOr<std::unique_ptr<HostTransfers>> {
                             if (!gloo) return absl::UnavailableError("no Gloo here");
                             return CreateGlooTransfers({1, 2}, "127.0.0.1", absl::Seconds(1));
                           }});
  }
  static std::vector<std::string> Offered(const std::string& collectives, bool gloo) {
    const auto link = Create(collectives, gloo);
    EXPECT_TRUE(link.ok()) << link.status();
    return link.ok() ? (*link)->CollectivesOffered() : std::vector<std::string>();
  }
};

TEST_F(CudaLinkTest, OffersWhatThereIsTheFastestFirst) {
  if (!HaveGloo()) GTEST_SKIP() << "a build without Gloo";
  EXPECT_THAT(Offered("auto", true), ElementsAre("nccl", "gloo"));
  EXPECT_THAT(Offered("auto", false), ElementsAre("nccl"));
  EXPECT_THAT(Offered("nccl", true), ElementsAre("nccl"));
  EXPECT_THAT(Offered("gloo", true), ElementsAre("gloo"));
  played.missing = true;
  EXPECT_THAT(Offered("auto", true), ElementsAre("gloo"));
}

TEST_F(CudaLinkTest, SaysWhichVersionOfNcclItHas) {
  EXPECT_EQ((*Create("nccl", false))->Traits().nccl_version, "2.28.3");
  EXPECT_EQ((*Create("auto", true))->Traits().nccl_version, "2.28.3");
  if (!HaveGloo()) GTEST_SKIP() << "a build without Gloo";
  EXPECT_EQ((*Create("gloo", true))->Traits().nccl_version, "");
}

TEST_F(CudaLinkTest, SaysWhyWhatIsAskedForIsMissing) {
  EXPECT_THAT(Create("gloo", false).status().message(),
              AllOf(HasSubstr("collectives must"), HasSubstr("no Gloo here"), HasSubstr("got gloo")));
  played.missing = true;
  for (const char* const wanted : {"nccl", "auto"}) {
    const absl::Status status = Create(wanted, false).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("libnccl2"), HasSubstr(absl::StrCat("got ", wanted))));
  }
}

TEST_F(CudaLinkTest, UsesOnlyWhatItOffers) {
  if (!HaveGloo()) GTEST_SKIP() << "a build without Gloo";
  const auto link = Create("gloo", true);
  ASSERT_TRUE(link.ok()) << link.status();
  EXPECT_THAT((*link)->UseCollectives("nccl").message(),
              HasSubstr("collectives must be one of gloo, got nccl"));
  EXPECT_TRUE((*link)->UseCollectives("gloo").ok());
  EXPECT_EQ((*link)->Join(nullptr).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*link)->JoinClasses(nullptr).code(), absl::StatusCode::kInvalidArgument);
}

// By NCCL rank 0 has an id for all, and the others have nothing to say.
TEST_F(CudaLinkTest, AWorkerHasNoIdOfNccl) {
  const auto link = Create("nccl", false);
  ASSERT_TRUE(link.ok()) << link.status();
  ASSERT_TRUE((*link)->UseCollectives("nccl").ok());
  EXPECT_EQ(*(*link)->Address(), "");
  EXPECT_EQ((*link)->Connect({"an id of another length", ""}).code(), absl::StatusCode::kInternal);
}

// A stream that does not get on.
class HungNcclTest : public NcclTest {
 protected:
  void SetUp() override {
    LOSSD_SKIP_WITHOUT_GPU();
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    const auto block = [](void* go_on) { static_cast<std::atomic<bool>*>(go_on)->wait(false); };
    ASSERT_EQ(cudaLaunchHostFunc(stream_, block, &go_on_), cudaSuccess);
  }
  void TearDown() override {
    GoOn();
    if (stream_ == nullptr) return;
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  void GoOn() {
    go_on_ = true;
    go_on_.notify_all();
  }
  std::vector<Nccl::Part> Parts() const { return {{0, nullptr, stream_}}; }

  cudaStream_t stream_ = nullptr;
  std::atomic<bool> go_on_ = false;
};

TEST_F(HungNcclTest, EndsInTime) {
  const auto nccl = Connect();
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  const absl::Status status = (*nccl)->Wait(Parts(), absl::Milliseconds(200));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("within 200ms: GPU 0"));
  EXPECT_EQ(played.aborted, 2);
}

TEST_F(HungNcclTest, AWaitForAnEventEndsInTime) {
  const auto nccl = Connect();
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  const absl::Status status = (*nccl)->Wait(0, event, absl::Milliseconds(200));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("within 200ms: GPU 0 waits for the others"));
  EXPECT_EQ(played.aborted, 2);
  GoOn();
  EXPECT_EQ((*nccl)->Wait(0, event, absl::Minutes(1)), status) << "the failure stays";
  cudaEventDestroy(event);
}

TEST_F(HungNcclTest, EndsAtWhatACommunicatorReports) {
  const auto nccl = Connect();
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  played.later = ncclRemoteError;
  const absl::Status status = (*nccl)->Wait(Parts(), absl::InfiniteDuration());
  EXPECT_THAT(status.message(), HasSubstr("an exchange of NCCL failed"));
  EXPECT_EQ(played.aborted, 2);
}

TEST_F(HungNcclTest, EndsWithTheReasonOfAnAbortFromElsewhere) {
  const auto nccl = Connect();
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  const absl::Status reason = absl::UnavailableError("rank 1 is lost");
  std::thread other([&] {
    (*nccl)->Abort(reason).IgnoreError();
    GoOn();  // as the kernels of NCCL end
  });
  EXPECT_EQ((*nccl)->Wait(Parts(), absl::InfiniteDuration()), reason);
  other.join();
}

TEST_F(HungNcclTest, WaitsForWhatGoesOn) {
  const auto nccl = Connect();
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  GoOn();
  EXPECT_TRUE((*nccl)->Wait(Parts()).ok());
  EXPECT_EQ(played.aborted, 0);
}

}  // namespace
}  // namespace lossd::kernels::cuda::nccl_test
