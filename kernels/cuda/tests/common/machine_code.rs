//! Machine code in a cubin for sm_90, by the numbers of its instructions: 16 bytes each, the operation
//! in the lowest 12 bits.

use std::ops::Range;

/// `HMMA`: a multiplication on tensor cores.
const TENSOR: u128 = 0x23c;
/// `FFMA`: a multiplication and an addition.
const MULTIPLY_ADD: u128 = 0x223;
/// `BRA`: a branch.
const BRANCH: u128 = 0x947;

/// The number of a field of so many bytes in an ELF file.
fn field(image: &[u8], at: usize, bytes: usize) -> usize {
    let bytes = image[at..at + bytes].iter().rev();
    bytes.fold(0, |number, &byte| number << 8 | usize::from(byte))
}

/// The instructions of a function, from its section of the ELF file that a cubin is.
fn instructions(image: &[u8], function: &str) -> Vec<u128> {
    let (headers, each) = (field(image, 0x28, 8), field(image, 0x3a, 2));
    let contents = |section: usize| {
        let header = headers + section * each;
        let from = field(image, header + 0x18, 8);
        &image[from..from + field(image, header + 0x20, 8)]
    };
    let names = contents(field(image, 0x3e, 2));
    let wanted = format!(".text.{function}\0");
    let is_wanted = |section: &usize| {
        let name = field(image, headers + section * each, 4);
        names[name..].starts_with(wanted.as_bytes())
    };
    let section = (0..field(image, 0x3c, 2)).find(is_wanted);
    let code = contents(section.unwrap_or_else(|| panic!("no code of {function}")));
    let instruction = |bytes: &[u8]| u128::from_le_bytes(bytes.try_into().expect("16 bytes"));
    code.chunks_exact(16).map(instruction).collect()
}

/// The instructions from the target of a backward branch to the branch; `None` if it is no such
/// branch. The distance counts words of 4 bytes, from the next instruction on: its lowest 8 bits are
/// bits 16 to 23, the others those from bit 34 on.
fn turn(at: usize, instruction: u128) -> Option<Range<usize>> {
    if instruction & 0xfff != BRANCH {
        return None;
    }
    let high = (instruction << 46) as i128 >> 80;
    let words = high << 8 | (instruction >> 16 & 0xff) as i128;
    let target = at as i128 + 1 + words / 4;
    let target = usize::try_from(target).ok()?;
    (target <= at).then_some(target..at + 1)
}

/// The multiplications on tensor cores in a function.
pub fn tensor_instructions(image: &[u8], function: &str) -> usize {
    count(TENSOR, &instructions(image, function))
}

fn count(operation: u128, code: &[u128]) -> usize {
    code.iter().filter(|i| *i & 0xfff == operation).count()
}

/// The multiplications on tensor cores in the innermost loop that has any, and all its
/// instructions.
pub fn tensor_share(image: &[u8], function: &str) -> [usize; 2] {
    share(TENSOR, image, function)
}

/// The multiply-adds in the innermost loop that has any, and all its instructions.
pub fn multiply_add_share(image: &[u8], function: &str) -> [usize; 2] {
    share(MULTIPLY_ADD, image, function)
}

fn share(operation: u128, image: &[u8], function: &str) -> [usize; 2] {
    let code = instructions(image, function);
    let loops = code.iter().enumerate().filter_map(|(at, i)| turn(at, *i));
    let counted = loops.map(|turn| [count(operation, &code[turn.clone()]), turn.len()]);
    let innermost = counted
        .filter(|[found, _]| *found > 0)
        .min_by_key(|[_, all]| *all);
    innermost.unwrap_or_else(|| panic!("{function} has no loop with {operation:#x}"))
}
