// The part of ONNX Runtime's C API that train.cpp needs. The API is a table of functions that only grows at its end, so
// that the number of an entry is the same in every release; with the release's own onnxruntime_c_api.h this file is not
// needed.
#pragma once

#include <cstddef>
#include <cstdint>

enum : int { kFloat = 1, kInt64 = 7 };  // element types, as in ONNX
enum : int { kWarning = 2, kArenaAllocator = 1, kDefaultMemory = 0 };

struct OrtStatus;
struct OrtEnv;
struct OrtSession;
struct OrtSessionOptions;
struct OrtMemoryInfo;
struct OrtValue;
struct OrtTensorInfo;

struct OrtApiBase {
  void* const* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// The table, with the numbers of the entries.
struct Ort {
  void* const* table;

  template <typename F>
  F* entry(int number) const {
    return reinterpret_cast<F*>(table[number]);
  }

  auto error_message() const { return entry<const char*(const OrtStatus*)>(2); }
  auto create_env() const { return entry<OrtStatus*(int, const char*, OrtEnv**)>(3); }
  auto create_session() const {
    return entry<OrtStatus*(const OrtEnv*, const void*, size_t, const OrtSessionOptions*, OrtSession**)>(8);
  }
  auto run() const {
    return entry<OrtStatus*(OrtSession*, const void*, const char* const*, const OrtValue* const*, size_t,
                            const char* const*, size_t, OrtValue**)>(9);
  }
  auto create_options() const { return entry<OrtStatus*(OrtSessionOptions**)>(10); }
  auto set_threads() const { return entry<OrtStatus*(OrtSessionOptions*, int)>(24); }
  auto create_tensor() const {
    return entry<OrtStatus*(const OrtMemoryInfo*, void*, size_t, const int64_t*, size_t, int, OrtValue**)>(49);
  }
  auto tensor_data() const { return entry<OrtStatus*(OrtValue*, void**)>(51); }
  auto element_count() const { return entry<OrtStatus*(const OrtTensorInfo*, size_t*)>(64); }
  auto tensor_info() const { return entry<OrtStatus*(const OrtValue*, OrtTensorInfo**)>(65); }
  auto create_memory_info() const { return entry<OrtStatus*(int, int, OrtMemoryInfo**)>(69); }
  auto release_env() const { return entry<void(OrtEnv*)>(92); }
  auto release_status() const { return entry<void(OrtStatus*)>(93); }
  auto release_memory_info() const { return entry<void(OrtMemoryInfo*)>(94); }
  auto release_session() const { return entry<void(OrtSession*)>(95); }
  auto release_value() const { return entry<void(OrtValue*)>(96); }
  auto release_tensor_info() const { return entry<void(OrtTensorInfo*)>(99); }
  auto release_options() const { return entry<void(OrtSessionOptions*)>(100); }
};

extern "C" const OrtApiBase* OrtGetApiBase();
