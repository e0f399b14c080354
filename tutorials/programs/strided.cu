// Two kernels that copy the same numbers. Compile with line numbers: nvcc -lineinfo -arch=sm_90 -o strided strided.cu
#include <cstdio>

__global__ void neighbours(const float *from, float *to, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = 2.0f * from[i];
}

__global__ void strided(const float *from, float *to, int n, int stride) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int j = (i % stride) * (n / stride) + i / stride;  // neighbouring threads read addresses that lie far apart
  if (i < n)
    to[i] = 2.0f * from[j];
}

int main() {
  const int n = 1 << 26;
  float *from, *to;
  cudaMalloc(&from, n * sizeof(float));
  cudaMalloc(&to, n * sizeof(float));
  cudaMemset(from, 0, n * sizeof(float));
  neighbours<<<n / 256, 256>>>(from, to, n);
  strided<<<n / 256, 256>>>(from, to, n, 1024);
  printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}
