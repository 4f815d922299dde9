// A product with the bits of Hopper's tensor cores: what it means is said by its twin in torch,
// reference.py, and by docs/numbers.md. No part of torch is needed here.
//
// A tile of COLUMNS results of a row goes through a block of terms at once, in two passes over the
// terms: their largest exponent, then their sum. Factors are divided by a power of two for each row,
// or column, of a block: so a product of two is exact in fp32, as is its multiple by a power of two
// where that is 1 or more; what lies behind its point the conversion to an integer cuts off. No
// number on the way is subnormal, which a processor's mode may take for 0. Where that does not hold,
// in blocks with infinities, NaNs or exponents that lie far apart, and for results that are infinite
// or subnormal, results are made one by one in integers.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace product {

// Compiled twice, where the loader can choose: 4 times as fast with AVX2, and hardly faster with
// AVX-512. What such a function calls has to be a part of it.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__)
#define MEGAOPT_FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define MEGAOPT_FOR_EACH_PROCESSOR
#endif
#define MEGAOPT_INLINE __attribute__((always_inline)) inline

using Index = std::int64_t;

constexpr int TERMS = 16;  // of a block, at most
constexpr int COLUMNS = 32, ROWS = 64;  // of a tile; of what one thread takes at once
constexpr int BLOCKS = 32;  // that are prepared before threads wait for each other
constexpr int NEAR = 8;  // of a tile's columns, which the nearest cache holds
constexpr int FRACTION = 25, LEAST = -133;  // FRACTION and LEAST in reference.py
constexpr std::uint32_t SIGN = 0x80000000, INFINITE = 0x7f800000, NOT_A_NUMBER = 0x7fffffff;
// Of a zero, which does not take part in the alignment; two of them fit 16 bits.
constexpr int NO_EXPONENT = -8192;
// So many binades may lie between products of a block for fp32 to hold them and their multiples as
// normal numbers; subnormal factors of bf16 and TF32 take up to 10 more each.
constexpr int APART = 100;

MEGAOPT_INLINE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

MEGAOPT_INLINE float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// That of a subnormal number, and of 0, is -126.
MEGAOPT_INLINE int exponent_of(std::uint32_t bits) {
  return std::max<int>(bits >> 23 & 0xff, 1) - 127;
}

MEGAOPT_INLINE int significand_of(std::uint32_t bits) {
  const int fraction = bits & 0x7fffff;
  return (bits & INFINITE) != 0 ? fraction | 0x800000 : fraction;
}

MEGAOPT_INLINE bool is_zero(std::uint32_t bits) { return bits << 1 == 0; }
MEGAOPT_INLINE bool is_finite(std::uint32_t bits) { return (bits & INFINITE) != INFINITE; }

// 2^exponent for normal numbers; less, or 0, below them, and 2^127 above.
MEGAOPT_INLINE float power_of_two(int exponent) {
  return float_of(std::min(std::max(exponent + 127, 0), 254) << 23);
}

// A count of bits to shift by that is too large, or negative, where what is shifted is 0.
MEGAOPT_INLINE int at_most(int shift, unsigned largest) {
  return std::min(static_cast<unsigned>(shift), largest);
}

// An element [i, j] lies at data[i * row + j * column].
struct Matrix {
  const float* data;
  Index row, column;

  MEGAOPT_INLINE std::uint32_t bits(Index i, Index j) const {
    return bits_of(data[i * row + j * column]);
  }
};

// --- one by one, in integers

// The factors of one result in a block.
struct Factors {
  std::uint32_t left[TERMS], right[TERMS];
  int count, least;

  int exponent(int k) const {
    if (is_zero(left[k]) || is_zero(right[k])) return NO_EXPONENT;
    return std::max(exponent_of(left[k]), least) + std::max(exponent_of(right[k]), least);
  }
};

// Of what is finite only the sign counts beside infinities.
inline float sign_of(std::uint32_t bits) {
  if (!is_finite(bits)) return float_of(bits);
  return is_zero(bits) ? 0.0f : (bits & SIGN) != 0 ? -1.0f : 1.0f;
}

// sum * 2^(top - FRACTION), cut to fp32.
inline float cut_to_fp32(std::int64_t sum, int top) {
  if (sum == 0) return 0.0f;
  const std::uint32_t sign = sum < 0 ? SIGN : 0;
  const std::uint64_t size = sum < 0 ? -sum : sum;
  const int unit = top - FRACTION, leading = 63 - __builtin_clzll(size);
  if (leading + unit > 127) return float_of(sign | INFINITE);
  const int cut = std::max(leading - 23, -149 - unit);
  const std::uint32_t kept = cut < 0 ? size << -cut : size >> cut;
  if (kept == 0) return 0.0f;
  // the leading bit of a normal number adds 1 to its exponent
  return float_of(sign | ((static_cast<std::uint32_t>(unit + cut + 149) << 23) + kept));
}

// A total and a block's products, one result.
inline float added(const Factors& own, float total) {
  const std::uint32_t begun = bits_of(total);
  float beside = sign_of(begun);
  for (int k = 0; k < own.count; ++k) beside += sign_of(own.left[k]) * sign_of(own.right[k]);
  if (beside != beside) return float_of(NOT_A_NUMBER);
  if (!is_finite(bits_of(beside))) return beside;
  int top = is_zero(begun) ? LEAST : std::max(exponent_of(begun), LEAST);
  for (int k = 0; k < own.count; ++k) top = std::max(top, own.exponent(k));
  std::int64_t sum = std::int64_t{significand_of(begun)} << (FRACTION - 23);
  sum >>= at_most(top - exponent_of(begun), 63);
  if ((begun & SIGN) != 0) sum = -sum;
  for (int k = 0; k < own.count; ++k) {
    const std::uint32_t some = own.left[k], other = own.right[k];
    const std::int64_t size = std::int64_t{significand_of(some)} * significand_of(other);
    const int unit = exponent_of(some) + exponent_of(other) - 2 * 23;
    const std::int64_t term = size >> at_most(top - FRACTION - unit, 63);
    sum += ((some ^ other) & SIGN) != 0 ? -term : term;
  }
  return cut_to_fp32(sum, top);
}

// --- a tile at once

// A block of factors, of so many rows of left or columns of right.
template <int LANES>
struct Block {
  float values[TERMS][LANES];  // divided by 2^top
  std::int16_t exponents[TERMS][LANES];  // as they count in the alignment, less top
  std::int32_t top[LANES];
  std::int32_t apart;  // so many binades lie between exponents of a lane; many if one is not finite
};

template <int LANES>
MEGAOPT_INLINE void find_top(Block<LANES>& block, const std::uint32_t (&bits)[TERMS][LANES]) {
  std::int32_t low[LANES], finite = 1;
  std::fill_n(block.top, LANES, NO_EXPONENT);
  std::fill_n(low, LANES, 128);
  for (int k = 0; k < TERMS; ++k) {
    for (int lane = 0; lane < LANES; ++lane) {
      const std::uint32_t own = bits[k][lane];
      const std::int32_t exponent = exponent_of(own);
      block.top[lane] = std::max(block.top[lane], is_zero(own) ? NO_EXPONENT : exponent);
      low[lane] = std::min(low[lane], is_zero(own) ? 128 : exponent);
      finite &= is_finite(own);
    }
  }
  block.apart = finite ? 0 : 2 * APART;
  for (int lane = 0; lane < LANES; ++lane) {
    block.apart = std::max(block.apart, block.top[lane] - low[lane]);
  }
}

template <int LANES>
MEGAOPT_INLINE void prepare(Block<LANES>& block, const std::uint32_t (&bits)[TERMS][LANES],
                            int least) {
  find_top(block, bits);
  for (int k = 0; k < TERMS; ++k) {
    for (int lane = 0; lane < LANES; ++lane) {
      const std::uint32_t own = bits[k][lane];
      const std::int32_t exponent = exponent_of(own), top = block.top[lane];
      block.exponents[k][lane] = is_zero(own) ? NO_EXPONENT : std::max(exponent, least) - top;
      const float size = significand_of(own) * power_of_two(exponent - top - 23);
      block.values[k][lane] = float_of(bits_of(size) | (own & SIGN));
    }
  }
}

// The largest exponent of a column's products, less those by which its factors were divided.
MEGAOPT_INLINE void find_high(const Block<1>& left, const Block<COLUMNS>& right, int terms,
                              std::int16_t* high) {
  for (int j = 0; j < COLUMNS; ++j) high[j] = 2 * NO_EXPONENT;
  for (int k = 0; k < terms; ++k) {
    const std::int16_t own = left.exponents[k][0];
    for (int j = 0; j < COLUMNS; ++j) {
      const std::int16_t exponent = own + right.exponents[k][j];
      high[j] = std::max(high[j], exponent);
    }
  }
}

// Adds a block's products to a tile's totals; returns whether it failed for some, and for which.
MEGAOPT_INLINE bool add_to_tile(const Block<1>& left, const Block<COLUMNS>& right, int terms,
                                float* totals, std::int32_t* fails) {
  std::int16_t high[COLUMNS];
  find_high(left, right, terms, high);
  std::int32_t tops[COLUMNS], sums[COLUMNS] = {}, any = 0;
  float scales[COLUMNS];
  for (int j = 0; j < COLUMNS; ++j) {
    const std::uint32_t begun = bits_of(totals[j]);
    const std::int32_t divided = left.top[0] + right.top[j];
    const std::int32_t own = is_zero(begun) ? LEAST : exponent_of(begun);
    tops[j] = std::max(std::max(high[j] + divided, own), LEAST);
    scales[j] = power_of_two(std::max(FRACTION - tops[j] + divided, -126));
  }
  for (int k = 0; k < terms; ++k) {
    const float own = left.values[k][0];
    for (int j = 0; j < COLUMNS; ++j) {
      sums[j] += static_cast<std::int32_t>(own * right.values[k][j] * scales[j]);
    }
  }
  for (int j = 0; j < COLUMNS; ++j) {
    const std::uint32_t bits = bits_of(totals[j]);
    const std::int32_t size =
        significand_of(bits) << (FRACTION - 23) >> at_most(tops[j] - exponent_of(bits), 31);
    const std::uint32_t begun = (bits & SIGN) != 0 ? -size : size;
    // 16 products below 2^27 fit 32 bits with their sign, and with the total without it
    const std::uint32_t own = sums[j], sum = own + begun;
    const std::uint32_t sign = (((own ^ sum) & (begun ^ sum)) ^ sum) & SIGN;
    const std::uint32_t whole = sign != 0 ? -sum : sum;
    // without the bit below the 24 of fp32, and some behind it, it is rounded down
    const std::uint32_t kept = whole & ~(whole >> 24);
    const float upper = static_cast<std::int32_t>(kept >> 16) * 65536.0f;
    const float found = upper + static_cast<std::int32_t>(kept & 0xffff);
    const std::int32_t shift = tops[j] - FRACTION;
    const std::int32_t exponent = static_cast<std::int32_t>(bits_of(found) >> 23) + shift;
    const std::uint32_t moved = bits_of(found) + (static_cast<std::uint32_t>(shift) << 23);
    totals[j] = float_of(whole == 0 ? 0 : moved | sign);
    const bool is_normal = (whole == 0) | ((exponent >= 1) & (exponent <= 254));
    fails[j] = !(is_finite(bits) & is_normal);
    any |= fails[j];
  }
  return any != 0;
}

// --- the whole

class Product {
 public:
  // out: [m, n], without gaps, with the totals; terms: 8 or 16, of a block; least: the exponent of
  // the type's smallest normal number.
  Product(Matrix left, Matrix right, float* out, Index m, Index k, Index n, int terms, int least)
      : left_(left), right_(right), out_(out), m_(m), k_(k), n_(n), terms_(terms), least_(least),
        rows_(m * BLOCKS), columns_(tiles() * BLOCKS) {}

  // each(count, grain, part): calls part(begin, end) for parts of 0 ... count - 1, on threads or not;
  // so many are some 50 us of work.
  template <typename Each>
  void run(Each each) {
    const auto bound = [this](auto part) {
      return [this, part](Index begin, Index end) { part(*this, begin, end); };
    };
    for (first_ = 0; first_ < k_; first_ += BLOCKS * terms_) {
      blocks_ = std::min<Index>(BLOCKS, (k_ - first_ + terms_ - 1) / terms_);
      each(m_, 64, bound(prepare_rows));
      each(tiles(), 2, bound(prepare_columns));
      each(tiles() * ((m_ + ROWS - 1) / ROWS), 1, bound(add_tiles));
    }
  }

 private:
  Index tiles() const { return (n_ + COLUMNS - 1) / COLUMNS; }
  Index begin(Index block) const { return first_ + block * terms_; }
  int count(Index block) const { return std::min<Index>(terms_, k_ - begin(block)); }

  MEGAOPT_FOR_EACH_PROCESSOR
  static void prepare_rows(Product& own, Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {
      for (Index block = 0; block < own.blocks_; ++block) {
        std::uint32_t bits[TERMS][1] = {};
        const Index first = own.begin(block);
        for (int k = 0; k < own.count(block); ++k) bits[k][0] = own.left_.bits(i, first + k);
        prepare(own.rows_[i * BLOCKS + block], bits, own.least_);
      }
    }
  }

  MEGAOPT_FOR_EACH_PROCESSOR
  static void prepare_columns(Product& own, Index begin, Index end) {
    for (Index tile = begin; tile < end; ++tile) {
      const Index first_column = tile * COLUMNS;
      const Index columns = std::min<Index>(COLUMNS, own.n_ - first_column);
      for (Index block = 0; block < own.blocks_; ++block) {
        std::uint32_t bits[TERMS][COLUMNS] = {};
        const Index first = own.begin(block);
        for (int k = 0; k < own.count(block); ++k) {
          for (Index j = 0; j < columns; ++j) {
            bits[k][j] = own.right_.bits(first + k, first_column + j);
          }
        }
        prepare(own.columns_[tile * BLOCKS + block], bits, own.least_);
      }
    }
  }

  MEGAOPT_FOR_EACH_PROCESSOR
  static void add_tiles(Product& own, Index begin, Index end) {
    const Index groups = (own.m_ + ROWS - 1) / ROWS;
    for (Index place = begin; place < end; ++place) {
      const Index tile = place / groups, row = place % groups * ROWS;
      for (Index block = 0; block < own.blocks_; block += NEAR) {
        for (Index i = row; i < std::min(own.m_, row + ROWS); ++i) own.add_row(i, tile, block);
      }
    }
  }

  MEGAOPT_INLINE void add_row(Index i, Index tile, Index first_block) {
    const Index first_column = tile * COLUMNS, columns = std::min<Index>(COLUMNS, n_ - first_column);
    float totals[COLUMNS] = {}, begun[COLUMNS];
    float* const out = out_ + i * n_ + first_column;
    std::copy_n(out, columns, totals);
    for (Index block = first_block; block < std::min(blocks_, first_block + NEAR); ++block) {
      const Block<1>& left = rows_[i * BLOCKS + block];
      const Block<COLUMNS>& right = columns_[tile * BLOCKS + block];
      std::int32_t fails[COLUMNS];
      std::copy_n(totals, COLUMNS, begun);
      bool fail = left.apart + right.apart > APART;
      if (fail) {
        std::fill_n(fails, COLUMNS, 1);
      } else {  // the compiler makes one for each number of terms
        fail = terms_ == TERMS ? add_to_tile(left, right, TERMS, totals, fails)
                               : add_to_tile(left, right, TERMS / 2, totals, fails);
      }
      for (Index j = 0; fail && j < columns; ++j) {
        if (fails[j]) totals[j] = added(factors(i, first_column + j, block), begun[j]);
      }
    }
    std::copy_n(totals, columns, out);
  }

  Factors factors(Index i, Index j, Index block) const {
    Factors found;
    found.count = count(block);
    found.least = least_;
    for (int k = 0; k < found.count; ++k) {
      found.left[k] = left_.bits(i, begin(block) + k);
      found.right[k] = right_.bits(begin(block) + k, j);
    }
    return found;
  }

  const Matrix left_, right_;
  float* const out_;
  const Index m_, k_, n_;
  const int terms_, least_;
  std::vector<Block<1>> rows_;
  std::vector<Block<COLUMNS>> columns_;
  Index first_ = 0, blocks_ = 0;
};

}  // namespace product
