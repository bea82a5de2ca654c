//! Instruction sets, chosen at run time.

use std::fmt;

/// A level of SIMD instructions. Every kernel exists at each level; tests can request one, users
/// get the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// The baseline of the target (SSE2 on x86-64, NEON on aarch64).
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    /// The best level this CPU has.
    pub fn detect() -> Isa {
        Isa::available().last().copied().unwrap_or(Isa::Portable)
    }

    /// Every level this CPU has, worst first.
    pub fn available() -> Vec<Isa> {
        let mut levels = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            let has = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if has && is_x86_feature_detected!("f16c") {
                levels.push(Isa::Avx2);
                let has =
                    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
                if has
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    levels.push(Isa::Avx512);
                }
            }
        }
        levels
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        })
    }
}
