//! The program `slabwise`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    slabwise_cli::main()
}
