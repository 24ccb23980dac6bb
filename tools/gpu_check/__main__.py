from minifsdp.course.cli import main

if __name__ == "__main__":
    main("tools.gpu_check.command")
