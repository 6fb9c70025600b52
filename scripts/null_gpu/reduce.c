// The reductions of NCCL, by type and operation.
#include "nccl.h"
#include <string.h>

enum {
    INT8,
    UINT8,
    INT32,
    UINT32,
    INT64,
    UINT64,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    NUM_TYPES
};
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };

size_t type_bytes(int type) {
    static const size_t bytes[NUM_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < NUM_TYPES ? bytes[type] : 0;
}

typedef uint16_t bfloat16;
static float from_bfloat16(bfloat16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
static bfloat16 to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; // to the nearest, to the even one of two
}

#define SAME(value) (value)
#define REDUCE(TYPE, WIDE, READ, WRITE)                                                                                \
    for (size_t index = 0; index < count; index++) {                                                                   \
        WIDE total = READ(((TYPE *)inputs[0])[index]) * (WIDE)factor;                                                  \
        for (int input = 1; input < num_inputs; input++) {                                                             \
            WIDE value = READ(((TYPE *)inputs[input])[index]) * (WIDE)factor;                                          \
            if (operation == PRODUCT)                                                                                  \
                total *= value;                                                                                        \
            else if (operation == MAXIMUM)                                                                             \
                total = value > total ? value : total;                                                                 \
            else if (operation == MINIMUM)                                                                             \
                total = value < total ? value : total;                                                                 \
            else                                                                                                       \
                total += value;                                                                                        \
        }                                                                                                              \
        if (operation == AVERAGE) total /= num_inputs;                                                                 \
        ((TYPE *)out)[index] = WRITE(total);                                                                           \
    }                                                                                                                  \
    return true

bool reduce(void *out, char *const inputs[], int num_inputs, size_t count, int type, int operation, double factor) {
    switch (type) {
    case INT8: REDUCE(int8_t, int64_t, SAME, SAME);
    case UINT8: REDUCE(uint8_t, int64_t, SAME, SAME);
    case INT32: REDUCE(int32_t, int64_t, SAME, SAME);
    case UINT32: REDUCE(uint32_t, uint64_t, SAME, SAME);
    case INT64: REDUCE(int64_t, int64_t, SAME, SAME);
    case UINT64: REDUCE(uint64_t, uint64_t, SAME, SAME);
    case FLOAT16: REDUCE(_Float16, float, SAME, SAME);
    case FLOAT32: REDUCE(float, float, SAME, SAME);
    case FLOAT64: REDUCE(double, double, SAME, SAME);
    case BFLOAT16: REDUCE(bfloat16, float, from_bfloat16, to_bfloat16);
    }
    return false;
}

double scalar(const void *value, int type) {
    switch (type) {
    case FLOAT16: return *(const _Float16 *)value;
    case FLOAT32: return *(const float *)value;
    case FLOAT64: return *(const double *)value;
    case BFLOAT16: return from_bfloat16(*(const bfloat16 *)value);
    }
    return 1;
}
