//! TLS and mutual TLS on gRPC and on the admin API, reloaded certificates, and `rediss://`.

use sluicegate_client::{Client as Limiter, Failure, descriptor};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::support::{
    DEADLINE, RedisCluster, RedisServer, Server,
    certificates::{Authority, Files},
    raw_client::{Client, Error},
    request_for, wait_for_async,
};

async fn connect(server: &Server, trusted: &Authority, identity: Option<&(String, String)>) -> Result<Client, Error> {
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&trusted.pem)).domain_name("localhost");
    if let Some((certificate, key)) = identity {
        tls = tls.identity(Identity::from_pem(certificate, key));
    }
    let endpoint = Endpoint::from_shared(format!("https://{}", server.grpc)).unwrap().tls_config(tls).unwrap();
    let client = Client::connect(endpoint).await?;
    // With TLS 1.3 a client sees only at its first call that the server rejected its certificate.
    client.check(request_for("example", &[("user", "x")])).await?;
    Ok(client)
}

#[tokio::test]
async fn certificates_are_served_and_reloaded() {
    let (first, second) = (Authority::new("first"), Authority::new("second"));
    let files = Files::new();
    let (certificate, key) = first.sign();
    let server = Server::builder()
        .set("grpc.tls.cert_file", &files.write("cert.pem", &certificate))
        .set("grpc.tls.key_file", &files.write("key.pem", &key))
        .start();
    assert!(connect(&server, &first, None).await.is_ok());
    assert!(connect(&server, &second, None).await.is_err());
    let plain = server.client().await.check(request_for("example", &[("user", "x")])).await;
    assert!(plain.is_err(), "plain text is rejected");

    files.write("cert.pem", "not a certificate");
    crate::support::wait_for("the invalid certificate to be noticed", || {
        server.log().contains("cannot use the changed certificates").then_some(())
    });
    assert!(connect(&server, &first, None).await.is_ok());

    let (certificate, key) = second.sign();
    files.write("key.pem", &key);
    files.write("cert.pem", &certificate);
    wait_for_async("the new certificate", async || connect(&server, &second, None).await.ok()).await;
    let lines = |text: &str| server.log().lines().filter(|line| line.contains(text)).count();
    assert_eq!(lines("cannot use the changed certificates"), 1, "{}", server.log());
    let (certificate, key) = first.sign();
    files.write("key.pem", &key);
    files.write("cert.pem", &certificate);
    wait_for_async("the old certificate", async || connect(&server, &first, None).await.ok()).await;
    // The log line is written after the certificates are in use.
    crate::support::wait_for("both log lines", || (lines("certificates reloaded") == 2).then_some(()));
}

#[tokio::test]
async fn clients_need_a_certificate_with_mutual_tls() {
    let (server_ca, client_ca, other_ca) =
        (Authority::new("ours"), Authority::new("clients"), Authority::new("strangers"));
    let files = Files::new();
    let (certificate, key) = server_ca.sign();
    let server = Server::builder()
        .set("grpc.tls.cert_file", &files.write("cert.pem", &certificate))
        .set("grpc.tls.key_file", &files.write("key.pem", &key))
        .set("grpc.tls.client_ca_file", &files.write("ca.pem", &client_ca.pem))
        .start();
    assert!(connect(&server, &server_ca, Some(&client_ca.sign())).await.is_ok());
    assert!(connect(&server, &server_ca, Some(&other_ca.sign())).await.is_err());
    assert!(connect(&server, &server_ca, None).await.is_err());
    for (name, accepted) in [("localhost", true), ("gateway.example", false)] {
        let server = Server::builder()
            .set("grpc.tls.cert_file", &files.write("cert.pem", &certificate))
            .set("grpc.tls.key_file", &files.write("key.pem", &key))
            .set("grpc.tls.client_ca_file", &files.write("ca.pem", &client_ca.pem))
            .set("grpc.tls.client_name", name)
            .start();
        assert_eq!(connect(&server, &server_ca, Some(&client_ca.sign())).await.is_ok(), accepted, "{name}");
    }
}

/// The client crate sends its certificate, both on streams and in single calls.
#[tokio::test]
async fn the_client_sends_its_certificate() {
    let (server_ca, client_ca) = (Authority::new("ours"), Authority::new("clients"));
    let files = Files::new();
    let (certificate, key) = server_ca.sign();
    let server = Server::builder()
        .set("grpc.tls.cert_file", &files.write("cert.pem", &certificate))
        .set("grpc.tls.key_file", &files.write("key.pem", &key))
        .set("grpc.tls.client_ca_file", &files.write("ca.pem", &client_ca.pem))
        .start();
    let (certificate, key) = client_ca.sign();
    let without_certificate =
        ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&server_ca.pem)).domain_name("localhost");
    let with_certificate = without_certificate.clone().identity(Identity::from_pem(certificate, key));
    let limiter = |tls: ClientTlsConfig, batching| {
        let limiter = Limiter::builder(format!("https://{}", server.grpc)).domain("example").timeout(DEADLINE);
        let limiter = limiter.batching(batching).configure(move |endpoint| endpoint.tls_config(tls.clone()));
        limiter.connect_lazy().unwrap()
    };
    for batching in [true, false] {
        let check = async |tls| limiter(tls, batching).check([descriptor! { "user" => "x" }]).without_fallback().await;
        assert!(check(with_certificate.clone()).await.unwrap().allowed());
        assert!(matches!(check(without_certificate.clone()).await, Err(Failure::Connection(_))));
    }
}

#[tokio::test]
async fn tls_works_with_a_cluster_and_a_ring() {
    let authority = Authority::new("redis");
    let files = Files::new();
    let (certificate, key) = authority.sign();
    let (certificate, key) = (files.write("cert.pem", &certificate), files.write("key.pem", &key));
    let ca = files.write("ca.pem", &authority.pem);
    let cluster = RedisCluster::tls(&certificate, &key, &ca);
    let nodes = [RedisServer::tls(&certificate, &key, &ca), RedisServer::tls(&certificate, &key, &ca)];
    let ring = format!("rediss+ring://localhost:{},localhost:{}", nodes[0].port, nodes[1].port);
    for store in [cluster.url().replace("redis+", "rediss+"), ring] {
        let server = Server::builder()
            .store(&store)
            .set("redis.tls.ca_file", &ca)
            .set("redis.tls.cert_file", &certificate)
            .set("redis.tls.key_file", &key)
            .set("redis.timeout", "1s")
            .start();
        let client = server.client().await;
        // With 24 users every node almost certainly has one of them.
        for user in 0..24 {
            let answer = client.check(request_for("example", &[("user", &user.to_string())])).await;
            assert!(answer.unwrap_or_else(|error| panic!("{store}: {error}\n{}", server.log())).allowed());
        }
    }
    assert!(nodes.iter().all(|node| node.cli(&["dbsize"]) != "0"));
}

#[tokio::test]
async fn tls_works_with_a_single_redis() {
    let authority = Authority::new("redis");
    let files = Files::new();
    let (certificate, key) = authority.sign();
    let (certificate, key) = (files.write("cert.pem", &certificate), files.write("key.pem", &key));
    let ca = files.write("ca.pem", &authority.pem);
    // The server listens for TLS on its usual port number, and for plain text on another.
    let redis = RedisServer::tls(&certificate, &key, &ca);
    let server = Server::builder()
        .store(&format!("rediss://localhost:{}", redis.port))
        .set("redis.tls.ca_file", &ca)
        .set("redis.tls.cert_file", &certificate)
        .set("redis.tls.key_file", &key)
        .start();
    let answer = server.client().await.check(request_for("example", &[("user", "x")])).await;
    assert!(answer.unwrap_or_else(|error| panic!("{error}\n{}", server.log())).allowed());
    assert_eq!(redis.cli(&["dbsize"]), "1");
}

/// The names in a certificate identify an operator.
#[test]
fn a_certificate_identifies_an_operator() {
    let (authority, strangers) = (Authority::new("ours"), Authority::new("theirs"));
    let files = Files::new();
    let (certificate, key) = authority.sign();
    let config = files.write("settings.toml", "[admin]\noperate = ['ops.test']\nread = ['dashboard.test']\n");
    let server = Server::builder()
        .args(["--config", &config])
        .set("admin.addr", "127.0.0.1:0")
        .set("admin.tls.cert_file", &files.write("cert.pem", &certificate))
        .set("admin.tls.key_file", &files.write("key.pem", &key))
        .set("admin.tls.client_ca_file", &files.write("ca.pem", &authority.pem))
        .start();
    let addr = format!("https://{}", crate::support::operator::admin_addr(&server));
    let ctl = |(certificate, key): &(String, String), args: &[&str]| {
        let (certificate, key) = (files.write("own.pem", certificate), files.write("own.key", key));
        let ca = files.write("ca.pem", &authority.pem);
        let own = ["ctl", "--addr", &addr, "--ca", &ca, "--cert", &certificate, "--key", &key];
        let output = crate::support::server::command().args(own).args(args).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let switch = ["switch", "off", "everything"];
    let operate = authority.sign_for(&["ops.test"]);
    assert_eq!(ctl(&operate, &switch), (true, String::new()));
    let read = authority.sign_for(&["dashboard.test"]);
    assert!(ctl(&read, &["audit"]).0);
    let (done, error) = ctl(&read, &switch);
    assert!(!done && error.contains("dashboard.test has the role read"), "{error}");
    let (done, error) = ctl(&authority.sign_for(&["else.test"]), &["audit"]);
    assert!(!done && error.contains("Unauthenticated"), "{error}");
    assert!(!ctl(&strangers.sign_for(&["ops.test"]), &["audit"]).0);
    let audit = crate::support::server::command()
        .args(["ctl", "--addr", &addr, "--ca", &files.write("ca.pem", &authority.pem), "audit"])
        .output()
        .unwrap();
    assert!(!audit.status.success(), "a caller without a certificate is rejected");
}
