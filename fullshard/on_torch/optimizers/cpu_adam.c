/* Adam's update of a run of parameters by a few cores, in one pass over memory: the gradient as it came, in bf16 or fp32,
   and the new parameter also in bf16; the master as it is, or packed (packing.py). Step by step the arithmetic of torch's
   fused kernels for the CPU, so that both give the same bits. Each core takes the next chunk when it is done with its own:
   on rented machines they are not equally fast. Compiled by cpu_adam.py. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CHUNK 131072 /* elements */

struct numbers {
    float factor[2];   /* on the gradient, one after the other */
    float kept;        /* of the parameter, after decoupled decay */
    float decay;       /* of the parameter, added to the gradient */
    float lerp, near_gradient; /* of the first moment: how far it goes, and from which end */
    float beta2, rest2;        /* of the second moment: the old one's share, and the new one's */
    float root, eps, step;
};

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float widen(uint16_t half) { return float_of((uint32_t)half << 16); }

static inline uint16_t narrow(float value) { /* to the nearest, and to the even one of two */
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value == value ? rounded : 0x7fc0u);
}

#define SIGN 0x80000000u
#define MIDDLE 0x8000u /* the low half of a value between two roundings */

static inline float whole(uint16_t rounded, uint16_t low, float second) {
    uint32_t from_above = (low == MIDDLE) & (bits_of(second) >> 31);
    return float_of(((uint32_t)rounded << 16) + (uint32_t)(int32_t)(int16_t)low + (from_above << 16));
}

static inline float marked(float second, float value, uint16_t rounded) {
    uint32_t bits = bits_of(value), from_above = ((bits & 0xffffu) == MIDDLE) & (bits >> 16 == rounded);
    return float_of((bits_of(second) & ~SIGN) | from_above << 31);
}

#define AT(out, at) ((out) ? (out) + (at) : (out))

/* Reads the master `p` and the second moment `v` of an element, and writes them. */
#define READ_WIDE(i) float p = master[i], v = second[i]
#define WRITE_WIDE(i) master[i] = p, second[i] = v
#define WRITE_ROUNDED(i) master[i] = p, second[i] = v, rounded[i] = narrow(p)
#define READ_PACKED(i) float p = whole(rounded[i], master[i], second[i]), v = float_of(bits_of(second[i]) & ~SIGN)
#define WRITE_PACKED(i) rounded[i] = narrow(p), master[i] = (uint16_t)bits_of(p), second[i] = marked(v, p, narrow(p))

/* Which of the two products is rounded before they are added: as torch's kernels are compiled. */
#ifdef __aarch64__
#define SECOND(v, g) fmaf(v, beta2, rest2 * g * g)
#else
#define SECOND(v, g) fmaf(rest2 * g, g, v * beta2)
#endif

#define UPDATE(NAME, MASTER, GRADIENT, READ, WRITE, WIDEN)                                                                    \
    static void NAME##_chunk(MASTER *restrict master, const GRADIENT *restrict gradient, float *restrict first,               \
                             float *restrict second, uint16_t *restrict rounded, ptrdiff_t count, const struct numbers *n) {  \
        const float f0 = n->factor[0], f1 = n->factor[1], kept = n->kept, decay = n->decay, lerp = n->lerp;                   \
        const float near_gradient = n->near_gradient, beta2 = n->beta2, rest2 = n->rest2;                                     \
        const float root = n->root, eps = n->eps, step = n->step;                                                             \
        for (ptrdiff_t i = 0; i < count; i++) {                                                                               \
            READ(i);                                                                                                          \
            p = p * kept;                                                                                                     \
            float g = fmaf(p, decay, WIDEN(gradient[i]) * f0 * f1);                                                           \
            float m = fmaf(lerp, g - first[i], near_gradient != 0.0f ? g : first[i]);                                         \
            v = SECOND(v, g);                                                                                                 \
            p = p + step * m / (sqrtf(v) / root + eps);                                                                       \
            first[i] = m;                                                                                                     \
            WRITE(i);                                                                                                         \
        }                                                                                                                     \
    }                                                                                                                         \
    void NAME(MASTER *master, const GRADIENT *gradient, float *first, float *second, uint16_t *rounded, ptrdiff_t count,      \
              const struct numbers *n, int threads) {                                                                         \
        const ptrdiff_t chunks = (count + CHUNK - 1) / CHUNK;                                                                 \
        _Pragma("omp parallel for num_threads(threads) schedule(dynamic)")                                                    \
        for (ptrdiff_t c = 0; c < chunks; c++) {                                                                              \
            const ptrdiff_t at = c * CHUNK, size = count - at < CHUNK ? count - at : CHUNK;                                   \
            NAME##_chunk(master + at, gradient + at, first + at, second + at, AT(rounded, at), size, n);                      \
        }                                                                                                                     \
    }

#define AS_IT_IS(x) (x)

UPDATE(from_fp32, float, float, READ_WIDE, WRITE_WIDE, AS_IT_IS)
UPDATE(from_fp32_rounded, float, float, READ_WIDE, WRITE_ROUNDED, AS_IT_IS)
UPDATE(from_fp32_packed, uint16_t, float, READ_PACKED, WRITE_PACKED, AS_IT_IS)
UPDATE(from_bf16, float, uint16_t, READ_WIDE, WRITE_WIDE, widen)
UPDATE(from_bf16_rounded, float, uint16_t, READ_WIDE, WRITE_ROUNDED, widen)
UPDATE(from_bf16_packed, uint16_t, uint16_t, READ_PACKED, WRITE_PACKED, widen)
