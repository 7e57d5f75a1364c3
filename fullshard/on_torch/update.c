/* Adam's update of a run of parameters by a few cores, in one pass over memory: the gradient as it came, in bf16 or fp32,
   and the new parameter also in bf16. Step by step the arithmetic of torch's fused kernels for the CPU, so that both give
   the same bits. Each core takes the next chunk when it is done with its own: on rented machines they are not equally fast.
   Compiled by one_pass.py. */

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

static inline float widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t narrow(float value) { /* to the nearest, and to the even one of two */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value == value ? rounded : 0x7fc0u);
}

#define AT(out, at) ((out) ? (out) + (at) : (out))

#define UPDATE(NAME, GRADIENT, READ, WRITE)                                                                                   \
    static void NAME##_chunk(float *restrict master, const GRADIENT *restrict gradient, float *restrict first,                \
                             float *restrict second, uint16_t *restrict rounded, ptrdiff_t count, const struct numbers *n) {  \
        const float f0 = n->factor[0], f1 = n->factor[1], kept = n->kept, decay = n->decay, lerp = n->lerp;                   \
        const float near_gradient = n->near_gradient, beta2 = n->beta2, rest2 = n->rest2;                                     \
        const float root = n->root, eps = n->eps, step = n->step;                                                             \
        for (ptrdiff_t i = 0; i < count; i++) {                                                                               \
            float p = master[i] * kept;                                                                                       \
            float g = fmaf(p, decay, READ(gradient[i]) * f0 * f1);                                                            \
            float m = fmaf(lerp, g - first[i], near_gradient != 0.0f ? g : first[i]);                                         \
            float v = fmaf(rest2 * g, g, second[i] * beta2);                                                                  \
            p = p + step * m / (sqrtf(v) / root + eps);                                                                       \
            master[i] = p;                                                                                                    \
            first[i] = m;                                                                                                     \
            second[i] = v;                                                                                                    \
            WRITE(rounded, i, p);                                                                                             \
        }                                                                                                                     \
    }                                                                                                                         \
    void NAME(float *master, const GRADIENT *gradient, float *first, float *second, uint16_t *rounded, ptrdiff_t count,       \
              const struct numbers *n, int threads) {                                                                         \
        const ptrdiff_t chunks = (count + CHUNK - 1) / CHUNK;                                                                 \
        _Pragma("omp parallel for num_threads(threads) schedule(dynamic)")                                                    \
        for (ptrdiff_t c = 0; c < chunks; c++) {                                                                              \
            const ptrdiff_t at = c * CHUNK, size = count - at < CHUNK ? count - at : CHUNK;                                   \
            NAME##_chunk(master + at, gradient + at, first + at, second + at, AT(rounded, at), size, n);                      \
        }                                                                                                                     \
    }

#define AS_IT_IS(x) (x)
#define KEEP(out, i, p) (out)[i] = narrow(p)
#define DROP(out, i, p) (void)(out)

UPDATE(from_fp32, float, AS_IT_IS, DROP)
UPDATE(from_fp32_rounded, float, AS_IT_IS, KEEP)
UPDATE(from_bf16, uint16_t, widen, DROP)
UPDATE(from_bf16_rounded, uint16_t, widen, KEEP)
