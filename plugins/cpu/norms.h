/* Norms and rotations of one row. */
#pragma once

#include "vector.h"

static void rms_norm(const float *x, const float *weight, float eps, float *out, long size) {
    f32x16 squares = splat(0);
    float rest = 0;
    long i = 0;
    for (; i + LANES <= size; i += LANES) squares = fma16(*(f32x16 *)(x + i), *(f32x16 *)(x + i), squares);
    for (long j = i; j < size; j++) rest += x[j] * x[j];
    const float scale = 1.0f / sqrtf((sum16(squares) + rest) / (float)size + eps);
    for (i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

static void rotate(float *x, const float *cos, const float *sin, long size) {
    const long half = size / 2;
    for (long i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}
