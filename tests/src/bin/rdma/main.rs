//! Pages between two machines by RDMA. `scripts/test-rdma` runs this program in two virtual machines,
//! in one as the holder of pages and in the other as their reader, whose exit status is the result.

mod faults;
mod holder;
mod nodes;
mod pages;
mod reader;
mod reads;
mod servers;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime can be made");
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["holder", address] => runtime.block_on(holder::run(address)),
        ["getter", address] => return runtime.block_on(nodes::get_over_and_over(address)),
        ["reader", address] => return runtime.block_on(reader::run(address)),
        _ => println!("scripts/test-rdma runs these tests, in virtual machines"),
    }
    ExitCode::SUCCESS
}
