// The identities of a sequence's blocks, each chained to the one before it: what `engine.identity` says, sooner.
//
// An identity is BLAKE2b (RFC 7693) of 16 bytes, personalised, over the parent's identity and the block's tokens.

#include <cstdint>
#include <cstring>

namespace {

constexpr int IDENTITY_BYTES = 16;
constexpr int INPUT_BYTES = 128;
constexpr uint64_t INITIAL[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};
constexpr uint8_t ORDER[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

inline uint64_t turned(uint64_t x, int bits) { return (x >> bits) | (x << (64 - bits)); }

inline void mix(uint64_t &a, uint64_t &b, uint64_t &c, uint64_t &d, uint64_t x, uint64_t y) {
    a += b + x;
    d = turned(d ^ a, 32);
    c += d;
    b = turned(b ^ c, 24);
    a += b + y;
    d = turned(d ^ a, 16);
    c += d;
    b = turned(b ^ c, 63);
}

template <int ROUND> inline void round(uint64_t (&v)[16], const uint64_t (&m)[16]) {
    constexpr const uint8_t(&s)[16] = ORDER[ROUND];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

void compress(uint64_t (&h)[8], const uint8_t *input, uint64_t taken, bool is_last) {
    uint64_t m[16], v[16];
    std::memcpy(m, input, INPUT_BYTES);
    for (int i = 0; i < 8; ++i) {
        v[i] = h[i];
        v[i + 8] = INITIAL[i];
    }
    v[12] ^= taken;
    v[14] ^= is_last ? ~uint64_t{0} : 0;
    round<0>(v, m);
    round<1>(v, m);
    round<2>(v, m);
    round<3>(v, m);
    round<4>(v, m);
    round<5>(v, m);
    round<6>(v, m);
    round<7>(v, m);
    round<8>(v, m);
    round<9>(v, m);
    round<10>(v, m);
    round<11>(v, m);
    for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
}

} // namespace

/// `packed`: `blocks` times `stride` bytes of tokens. `person`: 16 bytes. `out`: room for an identity of each block.
extern "C" __attribute__((visibility("default"))) void headrace_chain(
    const uint8_t *parent, const uint8_t *packed, int64_t stride, int64_t blocks, const uint8_t *person, uint8_t *out) {
    uint64_t begin[8];
    std::memcpy(begin, INITIAL, sizeof begin);
    begin[0] ^= 0x01010000 ^ IDENTITY_BYTES; // no key, one leaf of unbounded length
    uint64_t words[2];
    std::memcpy(words, person, sizeof words);
    begin[6] ^= words[0];
    begin[7] ^= words[1];
    for (int64_t block = 0; block < blocks; ++block, packed += stride, parent = out, out += IDENTITY_BYTES) {
        uint64_t h[8];
        std::memcpy(h, begin, sizeof h);
        uint8_t input[INPUT_BYTES];
        std::memcpy(input, parent, IDENTITY_BYTES);
        const int64_t size = IDENTITY_BYTES + stride;
        int64_t filled = IDENTITY_BYTES, taken = 0;
        for (;;) {
            const int64_t part = size - taken < INPUT_BYTES ? size - taken : INPUT_BYTES;
            std::memcpy(input + filled, packed + taken + filled - IDENTITY_BYTES, part - filled);
            std::memset(input + part, 0, INPUT_BYTES - part);
            taken += part;
            compress(h, input, taken, taken == size);
            if (taken == size) break;
            filled = 0;
        }
        std::memcpy(out, h, IDENTITY_BYTES);
    }
}
