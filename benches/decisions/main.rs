//! What a decision costs, beside a server that decides nothing. `make bench` runs it; it needs h2load and redis-server.
mod noop;
fn main() {
    let args: Vec<_> = std::env::args().collect();
    if args.get(1).is_some_and(|word| word == "noop") {
        noop::serve(2)
    }
}
