// Train the flat step of examples/digits with ONNX Runtime's C API:
//
//   ./train step.onnx step.safetensors digits.bin 10
//
// It reads what examples/browser/build.py writes, prints the loss of every epoch, and writes trained.bin, the parameters.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_api.h"

namespace {

constexpr int kApiVersion = 18, kPixels = 64, kBatch = 50, kTest = 297, kMoments = 2;
constexpr float kRate = 0.001f;

const Ort api{OrtGetApiBase()->GetApi(kApiVersion)};

void check(OrtStatus* status) {
  if (status == nullptr) return;
  const std::string text = api.error_message()(status);
  api.release_status()(status);
  throw std::runtime_error(text);
}

template <typename T>
using Owned = std::unique_ptr<T, void (*)(T*)>;

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("there is no file " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The parameters of a weights file: 8 bytes with the length of the header, the header, the numbers.
std::vector<float> parameters(const std::string& path) {
  const auto content = read(path);
  uint64_t length = 0;
  if (content.size() < sizeof length) throw std::runtime_error(path + " is no weights file");
  std::memcpy(&length, content.data(), sizeof length);
  if (length > content.size() - sizeof length) throw std::runtime_error(path + " is cut short");
  std::vector<float> values((content.size() - sizeof length - length) / sizeof(float));
  std::memcpy(values.data(), content.data() + sizeof length + length, values.size() * sizeof(float));
  return values;
}

class Step {
 public:
  Step(const std::string& model, std::vector<float> first)
      : env_(nullptr, api.release_env()),
        memory_(nullptr, api.release_memory_info()),
        session_(nullptr, api.release_session()),
        parameters(std::move(first)),
        moments_(kMoments * parameters.size()) {
    OrtEnv* env = nullptr;
    check(api.create_env()(kWarning, "train", &env));
    env_.reset(env);
    OrtMemoryInfo* memory = nullptr;
    check(api.create_memory_info()(kArenaAllocator, kDefaultMemory, &memory));
    memory_.reset(memory);
    OrtSessionOptions* options = nullptr;
    check(api.create_options()(&options));
    const Owned<OrtSessionOptions> held(options, api.release_options());
    check(api.set_threads()(options, 1));
    const auto content = read(model);
    OrtSession* session = nullptr;
    check(api.create_session()(env, content.data(), content.size(), options, &session));
    session_.reset(session);
  }

  float train(std::vector<float>& pixels, std::vector<int64_t>& labels) {
    const auto rows = static_cast<int64_t>(labels.size());
    float rate = kRate;
    int64_t number = ++steps_;
    const auto size = static_cast<int64_t>(parameters.size());
    const Owned<OrtValue> inputs[] = {
        tensor(pixels.data(), kFloat, {rows, kPixels}), tensor(labels.data(), kInt64, {rows}),
        tensor(parameters.data(), kFloat, {size}),      tensor(moments_.data(), kFloat, {kMoments * size}),
        tensor(&rate, kFloat, {1}),                     tensor(&number, kInt64, {1})};
    const char* names[] = {"pixels", "labels", "parameters", "moments", "learning_rate", "step"};
    const OrtValue* given[std::size(inputs)];
    std::transform(std::begin(inputs), std::end(inputs), given, [](const auto& each) { return each.get(); });
    const char* wanted[] = {"loss", "parameters.next", "moments.next"};
    OrtValue* results[std::size(wanted)] = {};
    check(api.run()(session_.get(), nullptr, names, given, std::size(names), wanted, std::size(wanted), results));
    const Owned<OrtValue> loss(results[0], api.release_value()), next(results[1], api.release_value()),
        moments(results[2], api.release_value());
    take(next.get(), parameters);
    take(moments.get(), moments_);
    return *data(loss.get());
  }

 private:
  template <typename T>
  Owned<OrtValue> tensor(T* values, int type, std::vector<int64_t> shape) const {
    const auto count = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    OrtValue* value = nullptr;
    check(api.create_tensor()(memory_.get(), values, count * sizeof(T), shape.data(), shape.size(), type, &value));
    return {value, api.release_value()};
  }

  static float* data(OrtValue* value) {
    void* found = nullptr;
    check(api.tensor_data()(value, &found));
    return static_cast<float*>(found);
  }

  static void take(OrtValue* value, std::vector<float>& into) {
    OrtTensorInfo* info = nullptr;
    check(api.tensor_info()(value, &info));
    const Owned<OrtTensorInfo> held(info, api.release_tensor_info());
    size_t count = 0;
    check(api.element_count()(info, &count));
    if (count != into.size()) throw std::runtime_error("the step gives other sizes than it takes");
    std::copy_n(data(value), count, into.begin());
  }

  Owned<OrtEnv> env_;
  Owned<OrtMemoryInfo> memory_;
  Owned<OrtSession> session_;
  int64_t steps_ = 0;

 public:
  std::vector<float> parameters;

 private:
  std::vector<float> moments_;
};

int run(int count, char** words) {
  if (count != 5) throw std::runtime_error("expected: train step.onnx step.safetensors digits.bin EPOCHS");
  if (api.table == nullptr) throw std::runtime_error("this onnxruntime is older than 1.18");
  Step step(words[1], parameters(words[2]));
  const auto digits = read(words[3]);
  std::vector<size_t> order(digits.size() / (kPixels + 1) - kTest);
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937 random(0);
  for (int epoch = 1; epoch <= std::atoi(words[4]); ++epoch) {
    std::shuffle(order.begin(), order.end(), random);
    float sum = 0;
    size_t batches = 0;
    for (size_t start = 0; start + kBatch <= order.size(); start += kBatch, ++batches) {
      std::vector<float> pixels;
      std::vector<int64_t> labels;
      for (size_t index = start; index < start + kBatch; ++index) {
        const char* row = digits.data() + order[index] * (kPixels + 1);
        std::transform(row, row + kPixels, std::back_inserter(pixels), [](char each) { return each / 16.0f; });
        labels.push_back(row[kPixels]);
      }
      sum += step.train(pixels, labels);
    }
    std::printf("epoch %d: loss %.4f\n", epoch, sum / batches);
  }
  std::ofstream("trained.bin", std::ios::binary)
      .write(reinterpret_cast<const char*>(step.parameters.data()), step.parameters.size() * sizeof(float));
  return 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    return run(count, words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
    return 1;
  }
}
