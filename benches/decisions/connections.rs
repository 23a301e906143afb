//! Memory of a server for each idle connection.

use tokio::net::TcpStream;

use super::{process::Process, users::Connection};

const CONNECTIONS: u32 = 800;

/// Compares the service with the no-op server, after each connection has made one call, and then 20 at once.
pub(crate) fn run() {
    println!("\nMemory of an idle connection, {CONNECTIONS} connections\n");
    println!("| server | KB, after one call | KB, after 20 calls at once |");
    println!("| --- | ---: | ---: |");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for (name, process) in
        [("no-op tonic", Process::bench(&["noop"]).listening()), ("memory", Process::service("memory"))]
    {
        let [one, many] = runtime.block_on(measure(&process));
        println!("| {name} | {one:.1} | {many:.1} |");
    }
    println!();
}

async fn measure(process: &Process) -> [f64; 2] {
    let mut connections = Vec::new();
    let mut bytes = [0.0; 2];
    // Memory that is independent of the number of connections.
    Connection::new(TcpStream::connect(process.address).await.unwrap()).send_all(0..1_000).await;
    let before = process.resident();
    for _ in 0..CONNECTIONS {
        let mut connection = Connection::new(TcpStream::connect(process.address).await.unwrap());
        connection.send_all(0..1).await;
        connections.push(connection);
    }
    bytes[0] = process.resident() - before;
    for connection in &mut connections {
        connection.send_all(0..20).await;
    }
    bytes[1] = process.resident() - before;
    bytes.map(|bytes| bytes / f64::from(CONNECTIONS) / 1e3)
}
